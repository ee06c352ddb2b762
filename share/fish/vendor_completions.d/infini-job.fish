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
        case socket
            __infini_job_say $prefix (__infini_job_files $value)
    end
end

function __infini_job_flags --argument-names verb current
    switch $verb
        case submit
            printf '%s\t%s\n' \
                slots= 'devices (GPUs, or CPUs) in all: one rank each' \
                slots_per_node= 'slots of each node' \
                slot_type= 'what a slot is' \
                gpu_type= 'which of a pool\'s GPUs' \
                cpus_per_slot= 'CPUs for each slot' \
                mem_per_slot= 'memory for each slot, such as 16G' \
                single_node 'all slots on one node' \
                spares= 'more nodes, which run nothing' \
                round_up 'take more slots where those asked for do not fill their nodes' \
                layout= 'how slots become nodes' \
                scheduler= 'who runs it' \
                pool= 'the partition or queue' \
                partition= 'the partition or queue' \
                queue= 'the partition or queue' \
                account= 'whom to charge' \
                project= 'Slurm\'s wckey, PBS\'s project' \
                time= 'the limit, such as 4h, 1h30m, 1d or 1-12:00:00' \
                options= 'further options for sbatch or qsub, quoted as in a shell' \
                gres 'the scheduler knows GPUs as a resource' \
                tres 'Slurm has cons_tres' \
                title= 'show TEXT before its name in squeue, qstat, and infini-job list' \
                dir= 'where jobs are kept, on storage that the nodes share' \
                cwd= 'where the ranks start' \
                env= 'variables for the ranks, beside all of ours' \
                python= 'the Python of the nodes, which has infini-run' \
                run_options= 'flags for infini-run itself, such as --hang_timeout=10m' \
                warn= 'tell the ranks so long before the limit' \
                array= 'a task for each index of 0-9, 1,3,7 or 0-20:5, at most M at a time' \
                restarts= 'run it again so often after a failure, through the queue' \
                container= 'run in this image' \
                runtime= 'by which program' \
                container_python= 'the image\'s Python, which has infini-run' \
                bind= 'HOST[:THERE[:ro]] words, beside the job\'s directories' \
                container_options= 'further options for the runtime' \
                wait 'stay until it has ended' \
                print 'show the script, and submit nothing' \
                check 'ask the scheduler whether it could ever run, and submit nothing' \
                json 'as JSON' \
                flagfile= 'read flags from FILE: one per line, # comments, further flag files' \
                fromenv= 'read flags a and b from the variables FLAGS_a and FLAGS_b' \
                tryfromenv= 'do the same as --fromenv, if the variables are set' \
                undefok= 'accept unknown flags a and b (write them --a=value)' \
                help 'show the flags on one screen' \
                helpfull 'show every flag, its values, and its default' \
                version 'print the version'
        case status
            printf '%s\t%s\n' \
                json 'as JSON' \
                dir= 'where jobs are kept, on storage that the nodes share' \
                flagfile= 'read flags from FILE: one per line, # comments, further flag files' \
                fromenv= 'read flags a and b from the variables FLAGS_a and FLAGS_b' \
                tryfromenv= 'do the same as --fromenv, if the variables are set' \
                undefok= 'accept unknown flags a and b (write them --a=value)' \
                help 'show the flags on one screen' \
                helpfull 'show every flag, its values, and its default' \
                version 'print the version'
        case list
            printf '%s\t%s\n' \
                json 'as JSON' \
                dir= 'where jobs are kept, on storage that the nodes share' \
                flagfile= 'read flags from FILE: one per line, # comments, further flag files' \
                fromenv= 'read flags a and b from the variables FLAGS_a and FLAGS_b' \
                tryfromenv= 'do the same as --fromenv, if the variables are set' \
                undefok= 'accept unknown flags a and b (write them --a=value)' \
                help 'show the flags on one screen' \
                helpfull 'show every flag, its values, and its default' \
                version 'print the version'
        case logs
            printf '%s\t%s\n' \
                follow 'go on until the job has ended' \
                task= 'of these tasks of an array only: 4, or 0,3-5' \
                rank= 'of this rank only' \
                node= 'of this node only' \
                attempt= 'of this run only, counted from 0' \
                tail= 'print at most the last N lines, then follow' \
                scheduler_log 'what its scheduler has said' \
                dir= 'where jobs are kept, on storage that the nodes share' \
                flagfile= 'read flags from FILE: one per line, # comments, further flag files' \
                fromenv= 'read flags a and b from the variables FLAGS_a and FLAGS_b' \
                tryfromenv= 'do the same as --fromenv, if the variables are set' \
                undefok= 'accept unknown flags a and b (write them --a=value)' \
                help 'show the flags on one screen' \
                helpfull 'show every flag, its values, and its default' \
                version 'print the version'
        case cancel
            printf '%s\t%s\n' \
                dir= 'where jobs are kept, on storage that the nodes share' \
                flagfile= 'read flags from FILE: one per line, # comments, further flag files' \
                fromenv= 'read flags a and b from the variables FLAGS_a and FLAGS_b' \
                tryfromenv= 'do the same as --fromenv, if the variables are set' \
                undefok= 'accept unknown flags a and b (write them --a=value)' \
                help 'show the flags on one screen' \
                helpfull 'show every flag, its values, and its default' \
                version 'print the version'
        case forget
            printf '%s\t%s\n' \
                dir= 'where jobs are kept, on storage that the nodes share' \
                flagfile= 'read flags from FILE: one per line, # comments, further flag files' \
                fromenv= 'read flags a and b from the variables FLAGS_a and FLAGS_b' \
                tryfromenv= 'do the same as --fromenv, if the variables are set' \
                undefok= 'accept unknown flags a and b (write them --a=value)' \
                help 'show the flags on one screen' \
                helpfull 'show every flag, its values, and its default' \
                version 'print the version'
        case clusters
            printf '%s\t%s\n' \
                json 'as JSON' \
                dir= 'where jobs are kept, on storage that the nodes share' \
                flagfile= 'read flags from FILE: one per line, # comments, further flag files' \
                fromenv= 'read flags a and b from the variables FLAGS_a and FLAGS_b' \
                tryfromenv= 'do the same as --fromenv, if the variables are set' \
                undefok= 'accept unknown flags a and b (write them --a=value)' \
                help 'show the flags on one screen' \
                helpfull 'show every flag, its values, and its default' \
                version 'print the version'
        case serve
            printf '%s\t%s\n' \
                socket= 'where to listen, in a directory that nobody else may write' \
                dir= 'where jobs are kept, on storage that the nodes share' \
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
                nosingle_node 'not: all slots on one node' \
                noround_up 'not: take more slots where those asked for do not fill their nodes' \
                nogres 'not: the scheduler knows GPUs as a resource' \
                notres 'not: Slurm has cons_tres' \
                nowait 'not: stay until it has ended' \
                noprint 'not: show the script, and submit nothing' \
                nocheck 'not: ask the scheduler whether it could ever run, and submit nothing' \
                nojson 'not: as JSON' \
                nohelp 'not: show the flags on one screen' \
                nohelpfull 'not: show every flag, its values, and its default' \
                noversion 'not: print the version'
        case status
            printf '%s\t%s\n' \
                nojson 'not: as JSON' \
                nohelp 'not: show the flags on one screen' \
                nohelpfull 'not: show every flag, its values, and its default' \
                noversion 'not: print the version'
        case list
            printf '%s\t%s\n' \
                nojson 'not: as JSON' \
                nohelp 'not: show the flags on one screen' \
                nohelpfull 'not: show every flag, its values, and its default' \
                noversion 'not: print the version'
        case logs
            printf '%s\t%s\n' \
                nofollow 'not: go on until the job has ended' \
                noscheduler_log 'not: what its scheduler has said' \
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
                nojson 'not: as JSON' \
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
        case status logs cancel forget
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
            submit 'write a job down, hand it to a batch scheduler once, and say what it is called' \
            status 'how jobs are: those named, or all that have not ended' \
            list 'every job that was submitted from here' \
            logs 'what the ranks of a job, or of the newest, have written, merged and labelled' \
            cancel 'end jobs; their ranks have their grace' \
            forget 'remove the directories of jobs that have ended, or are LOST' \
            clusters 'the schedulers that are here, and what they have' \
            serve 'the same over HTTP at a Unix socket, for its owner alone, with a page'
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
        if string match -q -- '-*' $word; and contains -- $name slots slots_per_node slot_type gpu_type cpus_per_slot mem_per_slot spares layout scheduler pool partition queue account project time options title dir cwd env python run_options warn array restarts container runtime container_python bind container_options task rank node attempt tail socket flagfile fromenv tryfromenv undefok
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
