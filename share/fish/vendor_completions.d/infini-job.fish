# fish completion for infini-job. Made from the table of flags by share/generate.py.

function __infini_job_say --argument-names prefix # the other words, each with that prefix
    for word in $argv[2..-1]
        printf '%s%s\n' $prefix $word
    end
end

function __infini_job_files --argument-names start # as fish completes them for a command that it does not know
    complete -C "'' $start"
end

function __infini_job_program # `$argv` is the program and its arguments so far, but the word to complete
    set -l current (commandline -ct)
    if set -q argv[1]
        complete -C (string join ' ' -- (string escape -- $argv) "$current")
    else if not string match -q -- '-*' $current
        __infini_job_files "$current"
        if test -n "$current"; and not string match -q -- '*/*' $current
            complete -C $current
        end
    end
end

function __infini_job_names --argument-names current # of lines `name TAB text`, spelled as what is typed
    set -l dashes (string match -r -- '^-*' $current)
    set -l body (string replace -r -- '^-*' '' $current)
    while read -l line
        if string match -q -- '*-*' $body
            set line (string replace -ra -- '_(?=[^\t]*\t)' '-' $line)
        end
        echo $dashes$line
    end
end

function __infini_job_offer --argument-names name value prefix # what the value of a flag can be
    switch $name
        case slot_type
            __infini_job_say $prefix 'cuda' 'rocm' 'cpu'
        case layout
            __infini_job_say $prefix 'default' 'determined'
        case scheduler
            __infini_job_say $prefix 'auto' 'slurm' 'pbs' 'local'
        case dir
            __infini_job_say $prefix (__fish_complete_directories $value '')
        case cwd
            __infini_job_say $prefix (__fish_complete_directories $value '')
        case python
            __infini_job_say $prefix (__infini_job_files $value)
        case container
            __infini_job_say $prefix (__infini_job_files $value)
        case runtime
            __infini_job_say $prefix 'apptainer' 'singularity' 'podman' 'enroot' 'pyxis'
        case container_python
            __infini_job_say $prefix (__infini_job_files $value)
        case flagfile
            __infini_job_say $prefix (__infini_job_files $value)
        case ranks
            __infini_job_say $prefix 'all'
        case socket
            __infini_job_say $prefix (__infini_job_files $value)
    end
end

function __infini_job_flags --argument-names verb current
    switch $verb
        case submit
            printf '%s\t%s\n' \
                slots= 'request N devices (GPUs or CPUs) in all, one rank each' \
                slots_per_node= 'request N slots per node' \
                slot_type= 'choose what one slot is: a GPU (cuda, rocm) or a CPU' \
                gpu_type= 'request GPUs of this type in the pool' \
                cpus_per_slot= 'request N CPUs per slot' \
                mem_per_slot= 'request SIZE of memory per slot, such as 16G' \
                single_node 'put all slots on one node' \
                spares= 'allocate N idle nodes' \
                round_up 'round slots up to fill their nodes' \
                layout= 'choose how slots become nodes' \
                scheduler= 'submit to this scheduler' \
                pool= 'submit to this partition or queue' \
                partition= 'submit to this partition or queue' \
                queue= 'submit to this partition or queue' \
                account= 'charge this account' \
                project= 'set the wckey of Slurm or the project of PBS' \
                time= 'limit the job to TIME, such as 4h, 1h30m, 1d, or 1-12:00:00' \
                options= 'pass options to sbatch or qsub, quoted as for a shell' \
                gres 'treat GPUs as a resource of the scheduler' \
                tres 'use cons_tres of Slurm' \
                title= 'show TEXT before the job\'s name in squeue, qstat, and infini-job list' \
                dir= 'keep jobs in DIR, on storage that the nodes share' \
                cwd= 'start ranks in DIR' \
                env= 'set variables of the ranks, such as \'A=1 B=2\', in addition to your environment' \
                python= 'run infini-run on the nodes with the Python FILE' \
                run_options= 'pass flags to infini-run, such as --hang_timeout=10m' \
                warn= 'send ranks SIGNAL (by default USR2) TIME before the limit' \
                array= 'run a task per index of 0-9, 1,3,7, or 0-20:5, at most M at a time' \
                restarts= 'queue the job again after a failure, at most N times' \
                max_timeouts= 'run the job again after exit code 85 at its time limit, at most N times' \
                container= 'run ranks in IMAGE' \
                runtime= 'use this container runtime' \
                container_python= 'run infini-run in the container with the image\'s Python FILE' \
                bind= 'show paths of the host in the container, HOST[:THERE[:ro]], in addition to the job\'s directories' \
                container_options= 'pass options to the runtime' \
                wait 'wait until the job finishes, and exit with the code of the first rank to fail' \
                print 'print the script and submit nothing' \
                check 'ask the scheduler whether the job can run, and submit nothing' \
                json 'print JSON' \
                flagfile= 'read flags from FILE: one per line, # comments, further flag files' \
                fromenv= 'read flags a and b from the variables FLAGS_a and FLAGS_b' \
                tryfromenv= 'do the same as --fromenv, if the variables are set' \
                undefok= 'accept unknown flags a and b (write them --a=value)' \
                help 'show the flags on one screen' \
                helpfull 'show every flag, its values, and its default' \
                version 'print the version'
        case status
            printf '%s\t%s\n' \
                json 'print JSON' \
                dir= 'look for jobs in DIR' \
                flagfile= 'read flags from FILE: one per line, # comments, further flag files' \
                fromenv= 'read flags a and b from the variables FLAGS_a and FLAGS_b' \
                tryfromenv= 'do the same as --fromenv, if the variables are set' \
                undefok= 'accept unknown flags a and b (write them --a=value)' \
                help 'show the flags on one screen' \
                helpfull 'show every flag, its values, and its default' \
                version 'print the version'
        case list
            printf '%s\t%s\n' \
                json 'print JSON' \
                dir= 'look for jobs in DIR' \
                flagfile= 'read flags from FILE: one per line, # comments, further flag files' \
                fromenv= 'read flags a and b from the variables FLAGS_a and FLAGS_b' \
                tryfromenv= 'do the same as --fromenv, if the variables are set' \
                undefok= 'accept unknown flags a and b (write them --a=value)' \
                help 'show the flags on one screen' \
                helpfull 'show every flag, its values, and its default' \
                version 'print the version'
        case logs
            printf '%s\t%s\n' \
                follow 'keep printing until the job finishes' \
                task= 'print only these tasks of an array: 4, or 0,3-5' \
                rank= 'print only rank R' \
                node= 'print only this node' \
                attempt= 'print only run K of the job' \
                tail= 'print the last N lines at most' \
                scheduler_log 'print what the scheduler wrote about the job' \
                dir= 'look for jobs in DIR' \
                flagfile= 'read flags from FILE: one per line, # comments, further flag files' \
                fromenv= 'read flags a and b from the variables FLAGS_a and FLAGS_b' \
                tryfromenv= 'do the same as --fromenv, if the variables are set' \
                undefok= 'accept unknown flags a and b (write them --a=value)' \
                help 'show the flags on one screen' \
                helpfull 'show every flag, its values, and its default' \
                version 'print the version'
        case top
            printf '%s\t%s\n' \
                dir= 'look for jobs in DIR' \
                flagfile= 'read flags from FILE: one per line, # comments, further flag files' \
                fromenv= 'read flags a and b from the variables FLAGS_a and FLAGS_b' \
                tryfromenv= 'do the same as --fromenv, if the variables are set' \
                undefok= 'accept unknown flags a and b (write them --a=value)' \
                help 'show the flags on one screen' \
                helpfull 'show every flag, its values, and its default' \
                version 'print the version'
        case follow
            printf '%s\t%s\n' \
                ranks= 'show only these ranks' \
                dir= 'look for jobs in DIR' \
                flagfile= 'read flags from FILE: one per line, # comments, further flag files' \
                fromenv= 'read flags a and b from the variables FLAGS_a and FLAGS_b' \
                tryfromenv= 'do the same as --fromenv, if the variables are set' \
                undefok= 'accept unknown flags a and b (write them --a=value)' \
                help 'show the flags on one screen' \
                helpfull 'show every flag, its values, and its default' \
                version 'print the version'
        case stacks
            printf '%s\t%s\n' \
                ranks= 'show only these ranks' \
                dir= 'look for jobs in DIR' \
                flagfile= 'read flags from FILE: one per line, # comments, further flag files' \
                fromenv= 'read flags a and b from the variables FLAGS_a and FLAGS_b' \
                tryfromenv= 'do the same as --fromenv, if the variables are set' \
                undefok= 'accept unknown flags a and b (write them --a=value)' \
                help 'show the flags on one screen' \
                helpfull 'show every flag, its values, and its default' \
                version 'print the version'
        case cancel
            printf '%s\t%s\n' \
                dir= 'look for jobs in DIR' \
                flagfile= 'read flags from FILE: one per line, # comments, further flag files' \
                fromenv= 'read flags a and b from the variables FLAGS_a and FLAGS_b' \
                tryfromenv= 'do the same as --fromenv, if the variables are set' \
                undefok= 'accept unknown flags a and b (write them --a=value)' \
                help 'show the flags on one screen' \
                helpfull 'show every flag, its values, and its default' \
                version 'print the version'
        case forget
            printf '%s\t%s\n' \
                dir= 'look for jobs in DIR' \
                flagfile= 'read flags from FILE: one per line, # comments, further flag files' \
                fromenv= 'read flags a and b from the variables FLAGS_a and FLAGS_b' \
                tryfromenv= 'do the same as --fromenv, if the variables are set' \
                undefok= 'accept unknown flags a and b (write them --a=value)' \
                help 'show the flags on one screen' \
                helpfull 'show every flag, its values, and its default' \
                version 'print the version'
        case clusters
            printf '%s\t%s\n' \
                json 'print JSON' \
                dir= 'accept DIR, without effect on the list' \
                flagfile= 'read flags from FILE: one per line, # comments, further flag files' \
                fromenv= 'read flags a and b from the variables FLAGS_a and FLAGS_b' \
                tryfromenv= 'do the same as --fromenv, if the variables are set' \
                undefok= 'accept unknown flags a and b (write them --a=value)' \
                help 'show the flags on one screen' \
                helpfull 'show every flag, its values, and its default' \
                version 'print the version'
        case serve
            printf '%s\t%s\n' \
                socket= 'listen at PATH, in a directory that only you can write' \
                dir= 'look for jobs in DIR' \
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
        case submit
            printf '%s\t%s\n' \
                nosingle_node 'not: put all slots on one node' \
                noround_up 'not: round slots up to fill their nodes' \
                nogres 'not: treat GPUs as a resource of the scheduler' \
                notres 'not: use cons_tres of Slurm' \
                nowait 'not: wait until the job finishes, and exit with the code of the first rank to fail' \
                noprint 'not: print the script and submit nothing' \
                nocheck 'not: ask the scheduler whether the job can run, and submit nothing' \
                nojson 'not: print JSON' \
                nohelp 'not: show the flags on one screen' \
                nohelpfull 'not: show every flag, its values, and its default' \
                noversion 'not: print the version'
        case status
            printf '%s\t%s\n' \
                nojson 'not: print JSON' \
                nohelp 'not: show the flags on one screen' \
                nohelpfull 'not: show every flag, its values, and its default' \
                noversion 'not: print the version'
        case list
            printf '%s\t%s\n' \
                nojson 'not: print JSON' \
                nohelp 'not: show the flags on one screen' \
                nohelpfull 'not: show every flag, its values, and its default' \
                noversion 'not: print the version'
        case logs
            printf '%s\t%s\n' \
                nofollow 'not: keep printing until the job finishes' \
                noscheduler_log 'not: print what the scheduler wrote about the job' \
                nohelp 'not: show the flags on one screen' \
                nohelpfull 'not: show every flag, its values, and its default' \
                noversion 'not: print the version'
        case top
            printf '%s\t%s\n' \
                nohelp 'not: show the flags on one screen' \
                nohelpfull 'not: show every flag, its values, and its default' \
                noversion 'not: print the version'
        case follow
            printf '%s\t%s\n' \
                nohelp 'not: show the flags on one screen' \
                nohelpfull 'not: show every flag, its values, and its default' \
                noversion 'not: print the version'
        case stacks
            printf '%s\t%s\n' \
                nohelp 'not: show the flags on one screen' \
                nohelpfull 'not: show every flag, its values, and its default' \
                noversion 'not: print the version'
        case cancel
            printf '%s\t%s\n' \
                nohelp 'not: show the flags on one screen' \
                nohelpfull 'not: show every flag, its values, and its default' \
                noversion 'not: print the version'
        case forget
            printf '%s\t%s\n' \
                nohelp 'not: show the flags on one screen' \
                nohelpfull 'not: show every flag, its values, and its default' \
                noversion 'not: print the version'
        case clusters
            printf '%s\t%s\n' \
                nojson 'not: print JSON' \
                nohelp 'not: show the flags on one screen' \
                nohelpfull 'not: show every flag, its values, and its default' \
                noversion 'not: print the version'
        case serve
            printf '%s\t%s\n' \
                nohelp 'not: show the flags on one screen' \
                nohelpfull 'not: show every flag, its values, and its default' \
                noversion 'not: print the version'
        end
    end
end

function __infini_job_jobs # by their directories
    set -q INFINI_JOB_DIR; or set -l INFINI_JOB_DIR ~/.infini-run/jobs
    for path in $INFINI_JOB_DIR/ir-*/
        basename $path
    end
end

function __infini_job_words --argument-names verb # what follows the flags
    switch $verb
        case submit
            __infini_job_program $argv[2..-1]
        case status logs top follow stacks cancel forget
            __infini_job_jobs
    end
end

function __infini_job_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    set -l last (count $words)
    set -l verb "$words[2]"
    if test $last -eq 1
        printf '%s\t%s\n' \
            submit 'submit a job and print its name' \
            status 'show the named jobs, or all unfinished ones' \
            list 'list all jobs in the directory of jobs' \
            logs 'print what the ranks of a job wrote, merged and labeled; by default the newest job' \
            top 'show the ranks of a running job in a table; q ends the view' \
            follow 'print the lines that ranks of a running job write from now on' \
            stacks 'print the stacks of the ranks of a running job' \
            cancel 'stop jobs; their ranks get their grace' \
            forget 'remove the directories of jobs that finished or are LOST' \
            clusters 'list the available schedulers and what they have' \
            serve 'serve jobs over HTTP at a Unix socket, with a page, for their owner alone'
        return
    end
    set -l i (math 2 + 1) # fish counts from 1
    while test $i -le $last
        set -l word $words[$i]
        if test "$word" = --
            __infini_job_words $verb $words[(math $i + 1)..-1]
            return
        end
        if not string match -q -- '-?*' $word; and contains -- $verb submit
            __infini_job_program $words[$i..-1]
            return
        end
        set -l name (string replace -r -- '^-*' '' $word | string replace -a -- - _)
        if string match -q -- '-*' $word; and contains -- $name slots slots_per_node slot_type gpu_type cpus_per_slot mem_per_slot spares layout scheduler pool partition queue account project time options title dir cwd env python run_options warn array restarts max_timeouts container runtime container_python bind container_options task rank node attempt tail ranks socket flagfile fromenv tryfromenv undefok
            if test $i -eq $last
                __infini_job_offer $name "$current" ''
                return
            end
            set i (math $i + 1)
        end
        set i (math $i + 1)
    end
    if not string match -q -- '-*' $current
        __infini_job_words $verb
    else if string match -q -- '*=*' $current
        set -l parts (string split -m 1 = -- $current)
        set -l name (string replace -r -- '^-*' '' $parts[1] | string replace -a -- - _)
        __infini_job_offer $name "$parts[2]" "$parts[1]="
    else
        __infini_job_flags $verb $current | __infini_job_names $current
    end
end

complete -c infini-job -f -k -a '(__infini_job_complete)'
