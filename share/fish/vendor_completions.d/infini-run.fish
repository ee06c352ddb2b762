# fish completion for infini-run. Made from the table of flags by share/generate.py.

function __infini_run_say --argument-names prefix # the other words, each with that prefix
    for word in $argv[2..-1]
        printf '%s%s\n' $prefix $word
    end
end

function __infini_run_files --argument-names start # as fish completes them for a command that it does not know
    complete -C "'' $start"
end

function __infini_run_program # `$argv` is the program and its arguments so far, but the word to complete
    set -l current (commandline -ct)
    if set -q argv[1]
        complete -C (string join ' ' -- (string escape -- $argv) "$current")
    else if not string match -q -- '-*' $current
        __infini_run_files "$current"
        if test -n "$current"; and not string match -q -- '*/*' $current
            complete -C $current
        end
    end
end

function __infini_run_names --argument-names current # of lines `name TAB text`, spelled as what is typed
    set -l dashes (string match -r -- '^-*' $current)
    set -l body (string replace -r -- '^-*' '' $current)
    while read -l line
        if string match -q -- '*-*' $body
            set line (string replace -ra -- '_(?=[^\t]*\t)' '-' $line)
        end
        echo $dashes$line
    end
end

function __infini_run_offer --argument-names name value prefix # what the value of a flag can be
    switch $name
        case nproc_per_node
            __infini_run_say $prefix 'auto' 'gpu' 'cpu'
        case preload
            __infini_run_say $prefix(string match -r -- '.*,' $value; or echo) (set -nx)
        case engine
            __infini_run_say $prefix 'local' 'ssh' 'slurm' 'pbs' 'mpi' 'auto'
        case hostfile
            __infini_run_say $prefix (__infini_run_files $value)
        case ssh_config
            __infini_run_say $prefix (__infini_run_files $value)
        case remote_python
            __infini_run_say $prefix (__infini_run_files $value)
        case token_file
            __infini_run_say $prefix (__infini_run_files $value)
        case export
            __infini_run_say $prefix(string match -r -- '.*,' $value; or echo) (set -nx)
        case on_join
            __infini_run_say $prefix 'wait' 'restart'
        case bind
            __infini_run_say $prefix 'none' 'numa' 'socket' 'cores'
        case check_gpus
            __infini_run_say $prefix 'off' 'warn' 'refuse'
        case omp_num_threads
            __infini_run_say $prefix 'auto'
        case log_dir
            __infini_run_say $prefix (__fish_complete_directories $value '')
        case log_layout
            __infini_run_say $prefix 'flat' 'torchrun'
        case console
            __infini_run_say $prefix 'auto' 'inherit' 'lines' 'prefix' 'none'
        case ranks_on_console
            __infini_run_say $prefix 'all'
        case stdin
            __infini_run_say $prefix 'rank0' 'all' 'none'
        case local_ranks_filter
            __infini_run_say $prefix 'all'
        case stop_signal
            __infini_run_say $prefix (command kill -l | string split -n ' ')
        case stop_scope
            __infini_run_say $prefix 'group' 'leader' 'mixed'
        case restart_window
            __infini_run_say $prefix 'off'
        case ready_timeout
            __infini_run_say $prefix 'off'
        case hang_timeout
            __infini_run_say $prefix 'off'
        case on_hang
            __infini_run_say $prefix 'report' 'stop'
        case report
            __infini_run_say $prefix (__infini_run_files $value)
        case dry_run
            __infini_run_say $prefix 'text' 'json'
        case live
            __infini_run_say $prefix 'on' 'off' 'auto'
        case trace
            __infini_run_say $prefix (__infini_run_files $value)
        case plot
            __infini_run_say $prefix (__infini_run_files $value)
        case doctor
            __infini_run_say $prefix 'text' 'json'
        case completion print_completion
            __infini_run_say $prefix 'bash' 'zsh' 'fish' 'install'
        case rdzv_backend
            __infini_run_say $prefix 'static' 'c10d'
        case numa_binding
            __infini_run_say $prefix 'node' 'socket' 'exclusive' 'core-complex'
        case flagfile
            __infini_run_say $prefix (__infini_run_files $value)
    end
end

function __infini_run_flags --argument-names verb current
    switch $verb
        case run
            printf '%s\t%s\n' \
                nnodes= 'how many nodes' \
                nproc_per_node= 'how many processes on each node' \
                node_rank= 'which node this is, from 0' \
                rdzv_endpoint= 'where rank 0 listens' \
                master_addr= 'the same host, on its own' \
                master_port= 'the same port, on its own' \
                standalone 'one node and a free port' \
                run_id= 'a name for this run, the same on every node' \
                rdzv_id= 'a name for this run, the same on every node' \
                module 'the program is a Python module, run with python -u -m' \
                no_python 'execute the program itself, always' \
                distributed_args 'add --distributed-rank=R --distributed-world-size=W to each process\'s arguments' \
                preload= 'import these modules once in one process, and fork all ranks from it, also at restarts' \
                preload_timeout= 'give up if the imports of --preload take longer than TIME' \
                engine= 'what reaches the other nodes' \
                hosts= 'the nodes, with how many processes each has room for' \
                hostfile= 'the same from a file' \
                ssh_config= 'a configuration file for ssh' \
                remote_python= 'the Python on the other nodes that has infini-run' \
                link_port= 'where the head listens, where nodes dial' \
                link_address= 'the one address that the head listens on for the nodes, or the interface that has it' \
                token_file= 'its first line is the secret that joins the launchers of all nodes' \
                join_timeout= 'how long to wait for all nodes to come' \
                node_timeout= 'after so much silence a node is lost' \
                export= 'variables of the environment that other nodes get too' \
                spares= 'how many more nodes wait, to take the place of one that is lost' \
                join_window= 'with --nnodes=MIN:MAX or --spares: how long a job that could start waits for nodes that have not come' \
                on_join= 'with fewer than MAX nodes, when another one joins: it waits as a spare, or all processes are started again with it' \
                node_check= 'run this on each node before it takes part, quoted as in a shell: a node where it does not exit 0 is left out, with its last line of output' \
                node_check_timeout= 'kill it, and leave the node out, after so long' \
                max_node_failures= 'a node whose processes were the first to fail in so many attempts is left out, if enough others are there' \
                gpus_per_proc= 'how many GPUs each process sees' \
                bind= 'the CPUs that each process is bound to, with the memory beside them: those of its GPU\'s NUMA node, of that node\'s socket, or whole cores of its own' \
                check_gpus 'look first who has memory on the GPUs of this job: tell it, or start nothing then' \
                omp_num_threads= 'OMP_NUM_THREADS where it is not set' \
                log_dir= 'write DIR/rank_<rank>.log for each process' \
                log_layout= 'flat: as above' \
                console= 'how output is shown: inherit: each process writes itself' \
                ranks_on_console= 'whose output is shown' \
                stdin= 'who reads this terminal\'s input' \
                redirects= 'as torchrun: the streams (1 stdout, 2 stderr, 3 both) that go to --log_dir only' \
                tee= 'as torchrun: the streams that go to --log_dir and to the console' \
                local_ranks_filter= 'as torchrun: the local ranks whose output is shown' \
                grace= 'time from the stop signal to KILL: 10, 10s, 500ms, 2m' \
                shutdown_timeout= 'time from the stop signal to KILL: 10, 10s, 500ms, 2m' \
                stop_signal= 'what asks a process to stop' \
                stop_scope= 'who gets it: each rank\'s process group, the rank\'s own process only, or that and at half the grace its group' \
                isolate 'run the job in a PID namespace of its own' \
                max_restarts= 'start all processes again when one has failed, so many times' \
                restart_delay= 'time before the first restart' \
                restart_window= 'a failure after so long a good run has all of --max_restarts before it again' \
                max_no_progress= 'end the job when so many starts in a row got no further, once a process has told its NOTIFY_SOCKET PROGRESS=number' \
                ready_timeout= 'stop the job when a process has not told its NOTIFY_SOCKET READY=1 so long after its start' \
                hang_timeout= 'a process hangs when it gives no sign of life for so long: no WATCHDOG=1, where it ever told its NOTIFY_SOCKET one' \
                on_hang= 'what is done then: say what every process waits in, or that, and stop the job' \
                report= 'write how every rank ended to FILE, as JSON' \
                keep_going 'let the other ranks finish when one has failed' \
                dry_run 'print the plan, every rank\'s environment and arguments, and start nothing' \
                verbose 'say what is done' \
                live 'one table of all ranks on all nodes, redrawn in place on the terminal that is our stderr, in place of --console' \
                trace= 'write the life of all ranks on all nodes to FILE, as a Chrome trace: open it in ui.perfetto.dev' \
                plot= 'start nothing: draw what has run, infini-run --plot=FILE.png REPORT.json|LOG_DIR...' \
                doctor 'start nothing: look at this machine, and with --hosts or --engine at every node, and say what each has for a launch' \
                completion= 'start nothing: print what makes this shell complete our flags' \
                print_completion= 'start nothing: print what makes this shell complete our flags' \
                rdzv_backend= 'honoured: c10d on a single node without endpoint means a free port, and the port of an endpoint without one is 29400' \
                rdzv_conf= 'honoured: join_timeout=SECONDS is --join_timeout' \
                role= 'honoured: the ROLE_NAME that the processes see' \
                numa_binding= 'honoured: node is --bind=numa, socket is --bind=socket, exclusive and core-complex are --bind=cores' \
                virtual_local_rank 'honoured: LOCAL_RANK is 0 for every process, and each sees its own GPUs only (--gpus_per_proc=1)' \
                flagfile= 'read flags from FILE: one a line, # comments, further flag files' \
                fromenv= 'take flags a and b from the variables FLAGS_a and FLAGS_b' \
                tryfromenv= 'the same, where they are set' \
                undefok= 'it is no error if there are no flags a and b (write them --a=value)' \
                help 'the flags on one screen' \
                helpfull 'every flag, its values and its default' \
                version 'the version'
    end
    if string match -qr -- '^-*no' $current
        switch $verb
        case run
            printf '%s\t%s\n' \
                nostandalone 'not: one node and a free port' \
                nomodule 'not: the program is a Python module, run with python -u -m' \
                nono_python 'not: execute the program itself, always' \
                nodistributed_args 'not: add --distributed-rank=R --distributed-world-size=W to each process\'s arguments' \
                nocheck_gpus 'not: look first who has memory on the GPUs of this job: tell it, or start nothing then' \
                noisolate 'not: run the job in a PID namespace of its own' \
                nokeep_going 'not: let the other ranks finish when one has failed' \
                nodry_run 'not: print the plan, every rank\'s environment and arguments, and start nothing' \
                noverbose 'not: say what is done' \
                nolive 'not: one table of all ranks on all nodes, redrawn in place on the terminal that is our stderr, in place of --console' \
                nodoctor 'not: start nothing: look at this machine, and with --hosts or --engine at every node, and say what each has for a launch' \
                novirtual_local_rank 'not: honoured: LOCAL_RANK is 0 for every process, and each sees its own GPUs only (--gpus_per_proc=1)' \
                nohelp 'not: the flags on one screen' \
                nohelpfull 'not: every flag, its values and its default' \
                noversion 'not: the version'
        end
    end
end

function __infini_run_words --argument-names verb # what follows the flags
    switch $verb
        case run
            __infini_run_program $argv[2..-1]
    end
end

function __infini_run_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    set -l last (count $words)
    set -l verb run
    set -l i (math 1 + 1) # fish counts from 1
    while test $i -le $last
        set -l word $words[$i]
        if test "$word" = --
            __infini_run_words $verb $words[(math $i + 1)..-1]
            return
        end
        if not string match -q -- '-?*' $word; and contains -- $verb run
            __infini_run_program $words[$i..-1]
            return
        end
        set -l name (string replace -r -- '^-*' '' $word | string replace -a -- - _)
        if string match -q -- '-*' $word; and contains -- $name nnodes nproc_per_node node_rank rdzv_endpoint master_addr master_port run_id rdzv_id preload preload_timeout engine hosts hostfile ssh_config remote_python link_port link_address token_file join_timeout node_timeout export spares join_window on_join node_check node_check_timeout max_node_failures gpus_per_proc bind omp_num_threads log_dir log_layout console ranks_on_console stdin redirects r tee t local_ranks_filter grace shutdown_timeout stop_signal stop_scope max_restarts restart_delay restart_window max_no_progress ready_timeout hang_timeout on_hang report trace plot completion print_completion rdzv_backend rdzv_conf role numa_binding monitor_interval start_method event_log_handler log_line_prefix_template local_addr signals_to_handle logs_specs duplicate_stdout_filters duplicate_stderr_filters flagfile fromenv tryfromenv undefok
            if test $i -eq $last
                __infini_run_offer $name "$current" ''
                return
            end
            set i (math $i + 1)
        end
        set i (math $i + 1)
    end
    if not string match -q -- '-*' $current
        __infini_run_words $verb
    else if string match -q -- '*=*' $current
        set -l parts (string split -m 1 = -- $current)
        set -l name (string replace -r -- '^-*' '' $parts[1] | string replace -a -- - _)
        __infini_run_offer $name "$parts[2]" "$parts[1]="
    else
        __infini_run_flags $verb $current | __infini_run_names $current
    end
end

complete -c infini-run -f -k -a '(__infini_run_complete)'
