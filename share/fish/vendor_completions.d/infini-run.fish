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
        case programs
            __infini_run_say $prefix (__infini_run_files $value)
        case on_nodes
            __infini_run_say $prefix 'all' 'rest'
        case after
            __infini_run_say $prefix(string match -r -- '.*,' $value; or echo) (set -nx)
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
            __infini_run_say $prefix 'auto' 'inherit' 'lines' 'prefix' 'fold' 'none'
        case color
            __infini_run_say $prefix 'auto' 'always' 'never'
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
        case restart_scope
            __infini_run_say $prefix 'job' 'program'
        case restart_window
            __infini_run_say $prefix 'off'
        case ready_timeout
            __infini_run_say $prefix 'off'
        case hang_timeout
            __infini_run_say $prefix 'off'
        case progress_timeout
            __infini_run_say $prefix 'off'
        case on_hang
            __infini_run_say $prefix 'report' 'stop'
        case snapshots
            __infini_run_say $prefix 'hang' 'failure' 'off'
        case report
            __infini_run_say $prefix (__infini_run_files $value)
        case termination_log
            __infini_run_say $prefix (__infini_run_files $value)
        case dry_run
            __infini_run_say $prefix 'text' 'json'
        case live
            __infini_run_say $prefix 'on' 'off' 'auto'
        case trace
            __infini_run_say $prefix (__infini_run_files $value)
        case metrics
            __infini_run_say $prefix (__infini_run_files $value)
        case list
            __infini_run_say $prefix 'text' 'json'
        case stacks
            __infini_run_say $prefix 'text' 'json'
        case send
            __infini_run_say $prefix (command kill -l | string split -n ' ')
        case bundle
            __infini_run_say $prefix (__fish_complete_directories $value '')
        case ranks
            __infini_run_say $prefix 'all'
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
                nnodes= 'run on N nodes' \
                nproc_per_node= 'start N ranks on each node' \
                node_rank= 'set the rank of this node, from 0' \
                rdzv_endpoint= 'set where rank 0 listens' \
                master_addr= 'host of --rdzv_endpoint' \
                master_port= 'port of --rdzv_endpoint' \
                standalone 'run on one node, with a free port' \
                run_id= 'name this run' \
                rdzv_id= 'name this run' \
                program= 'name the program, which may be one of several: --program=a [flags] a.py : --program=b [flags] b.py' \
                programs= 'read the programs from FILE: one [[program]] table of TOML each, with name, command, env, cwd, and flags' \
                one_world 'put all programs into one world, with ranks numbered one program after the other' \
                on_nodes= 'start this program on these nodes only' \
                after= 'start this program once all ranks of the named ones have sent READY=1, or exited with code 0' \
                ready_port= 'with --after: treat this program as ready once PORT answers on each of its nodes' \
                ends_job 'stop the other programs when all ranks of this one exited with code 0' \
                module 'run a Python module, with python -u -m' \
                no_python 'execute the program itself' \
                distributed_args 'add --distributed-rank=R --distributed-world-size=W to each rank\'s arguments' \
                preload= 'import these modules once per node, and fork all ranks from that process, also at restarts' \
                preload_timeout= 'give up if the imports of --preload take longer than TIME' \
                engine= 'choose how to reach other nodes' \
                hosts= 'list the nodes' \
                hostfile= 'read the list of --hosts from a file' \
                ssh_config= 'use this configuration file for ssh' \
                remote_python= 'use this Python on other nodes' \
                link_port= 'listen on PORT for other nodes' \
                link_address= 'listen for other nodes on this address only, or on the address of this interface' \
                token_file= 'read the secret that joins the launchers of all nodes from the first line of FILE' \
                join_timeout= 'wait at most TIME for all nodes to join' \
                node_timeout= 'treat nodes silent for TIME as lost' \
                export= 'pass these variables to other nodes' \
                spares= 'keep N more nodes waiting, to replace lost ones' \
                join_window= 'wait TIME for missing nodes once enough have joined, with --nnodes=MIN:MAX or --spares' \
                on_join= 'choose what follows when a node joins a job below MAX nodes' \
                node_check= 'run COMMAND (quoted words, without a shell) on each node first' \
                node_check_timeout= 'kill the check and exclude the node after TIME' \
                max_node_failures= 'exclude a node whose ranks failed first in N attempts, if enough others remain' \
                gpus_per_proc= 'show N GPUs to each rank' \
                bind= 'bind each rank to CPUs and to the memory near them' \
                check_gpus 'check whether other processes hold memory on the GPUs' \
                omp_num_threads= 'set OMP_NUM_THREADS if it is unset' \
                log_dir= 'write DIR/rank_<rank>.log for each rank' \
                log_layout= 'choose the files in --log_dir' \
                console= 'choose how output is shown' \
                timestamps 'show the time (UTC) before each line of a rank' \
                color= 'color the labels of lines' \
                ranks_on_console= 'show the output of these ranks only' \
                stdin= 'give the input of this terminal to this rank, all, or none' \
                redirects= 'send these streams (1: stdout, 2: stderr, 3: both) to --log_dir only, as torchrun does' \
                tee= 'send these streams to --log_dir and to the console, as torchrun does' \
                local_ranks_filter= 'show the output of these local ranks only, as torchrun does' \
                grace= 'wait TIME (10, 10s, 500ms, 2m) between the stop signal and KILL, whatever the cause' \
                shutdown_timeout= 'wait TIME (10, 10s, 500ms, 2m) between the stop signal and KILL, whatever the cause' \
                stop_signal= 'send SIGNAL to ask ranks to stop' \
                stop_scope= 'choose who gets the stop signal' \
                isolate 'run the job in a separate PID namespace' \
                max_restarts= 'restart all ranks after a failure, at most N times until --restart_window or PROGRESS= resets the count' \
                restart_scope= 'choose what restarts after a failure' \
                restart_delay= 'wait TIME before the first restart, and twice as long before each further one, up to 5 minutes' \
                restart_window= 'reset the restart count after TIME without a failure' \
                max_no_progress= 'end the job after N attempts in a row without progress, if ranks report PROGRESS=' \
                ready_timeout= 'stop the job if a rank has not sent READY=1 within TIME' \
                hang_timeout= 'treat a rank as hung after TIME without output and CPU use, noticed within twice TIME' \
                progress_timeout= 'treat the job as hung if no rank has sent a higher PROGRESS= for TIME, counted from the first one' \
                on_hang= 'choose what follows a hang' \
                snapshots= 'choose when to look at what ranks wait in' \
                report= 'write how every rank ended to FILE, as JSON' \
                termination_log= 'write the first failure to FILE, at most 4096 bytes, for Kubernetes: /dev/termination-log' \
                keep_going 'let the other ranks finish after a failure' \
                dry_run 'print the plan, with every rank\'s environment and arguments, and start nothing' \
                verbose 'print each step' \
                live 'show one table of all ranks on all nodes in place of --console, if stderr is a terminal' \
                trace= 'write the life of all ranks on all nodes to FILE, as a Chrome trace for ui.perfetto.dev' \
                events= 'append a line of JSON to FILE, or to an open descriptor, for each event of the launch, while it runs' \
                metrics= 'write the numbers of the launch to FILE while it runs, as node_exporter reads them' \
                metrics_interval= 'replace the file of --metrics every TIME' \
                list 'list the launches of this user that run here, or of all users for root' \
                top 'show the ranks of a running launch in a table, as --live does' \
                follow 'print the lines that ranks of a running launch write from now on' \
                tail= 'print the last N lines of each rank first, with --follow' \
                stacks 'print the Python stack of every rank of a running launch, by py-spy, or the system call that it waits in' \
                stop 'ask a running launch to stop, as SIGTERM does' \
                send= 'send SIGNAL to the ranks of a running launch, named as for --stop' \
                bundle= 'write a running launch\'s report, trace, and stacks so far, and its ranks\' variables without secrets, to the new folder DIR, for a bug report' \
                ranks= 'ask about these ranks only, with --follow, --stacks, or --send' \
                plot= 'draw a finished launch, and start nothing: infini-run --plot=FILE.png REPORT.json|LOG_DIR...' \
                doctor 'check this machine, and every node of --hosts or --engine, for what a launch needs, and start nothing' \
                completion= 'print a script that completes flags in this shell, and start nothing' \
                print_completion= 'print a script that completes flags in this shell, and start nothing' \
                rdzv_backend= 'choose the default port, as torchrun does' \
                rdzv_conf= 'read --join_timeout from join_timeout=SECONDS' \
                role= 'set ROLE_NAME of the ranks' \
                numa_binding= 'bind ranks as torchrun does' \
                virtual_local_rank 'set LOCAL_RANK to 0 for every rank, which sees only its GPU (implies --gpus_per_proc=1)' \
                flagfile= 'read flags from FILE: one per line, # comments, further flag files' \
                fromenv= 'read flags a and b from the variables FLAGS_a and FLAGS_b' \
                tryfromenv= 'do the same as --fromenv, if the variables are set' \
                undefok= 'accept unknown flags a and b (write them --a=value)' \
                help 'show the flags on one screen' \
                helpfull 'show every flag, its values, and its default' \
                version 'print the version'
    end
    if string match -qr -- '^-*no' $current
        switch $verb
        case run
            printf '%s\t%s\n' \
                nostandalone 'not: run on one node, with a free port' \
                noone_world 'not: put all programs into one world, with ranks numbered one program after the other' \
                noends_job 'not: stop the other programs when all ranks of this one exited with code 0' \
                nomodule 'not: run a Python module, with python -u -m' \
                nono_python 'not: execute the program itself' \
                nodistributed_args 'not: add --distributed-rank=R --distributed-world-size=W to each rank\'s arguments' \
                nocheck_gpus 'not: check whether other processes hold memory on the GPUs' \
                notimestamps 'not: show the time (UTC) before each line of a rank' \
                noisolate 'not: run the job in a separate PID namespace' \
                nokeep_going 'not: let the other ranks finish after a failure' \
                nodry_run 'not: print the plan, with every rank\'s environment and arguments, and start nothing' \
                noverbose 'not: print each step' \
                nolive 'not: show one table of all ranks on all nodes in place of --console, if stderr is a terminal' \
                nolist 'not: list the launches of this user that run here, or of all users for root' \
                notop 'not: show the ranks of a running launch in a table, as --live does' \
                nofollow 'not: print the lines that ranks of a running launch write from now on' \
                nostacks 'not: print the Python stack of every rank of a running launch, by py-spy, or the system call that it waits in' \
                nostop 'not: ask a running launch to stop, as SIGTERM does' \
                nodoctor 'not: check this machine, and every node of --hosts or --engine, for what a launch needs, and start nothing' \
                novirtual_local_rank 'not: set LOCAL_RANK to 0 for every rank, which sees only its GPU (implies --gpus_per_proc=1)' \
                nohelp 'not: show the flags on one screen' \
                nohelpfull 'not: show every flag, its values, and its default' \
                noversion 'not: print the version'
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
        if string match -q -- '-*' $word; and contains -- $name nnodes nproc_per_node node_rank rdzv_endpoint master_addr master_port run_id rdzv_id program programs on_nodes after ready_port preload preload_timeout engine hosts hostfile ssh_config remote_python link_port link_address token_file join_timeout node_timeout export spares join_window on_join node_check node_check_timeout max_node_failures gpus_per_proc bind omp_num_threads log_dir log_layout console color ranks_on_console stdin redirects r tee t local_ranks_filter grace shutdown_timeout stop_signal stop_scope max_restarts restart_scope restart_delay restart_window max_no_progress ready_timeout hang_timeout progress_timeout on_hang snapshots report termination_log trace events metrics metrics_interval tail send bundle ranks plot completion print_completion rdzv_backend rdzv_conf role numa_binding monitor_interval start_method event_log_handler log_line_prefix_template local_addr signals_to_handle logs_specs duplicate_stdout_filters duplicate_stderr_filters flagfile fromenv tryfromenv undefok
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
