"""What makes bash, zsh and fish complete infini-job: its verbs, their flags, values where only some are allowed, and
the names of jobs. Out of the tables of flags; the scripts stand alone."""

from __future__ import annotations

from infini_run.jobs.options.help import SHORT
from infini_run.jobs.options.table import VERBS
from infini_run.options.completed_values import values
from infini_run.options.completion import zsh_specs
from infini_run.options.fish_completion import FUNCTIONS, fill, fish_cases, fish_names, fish_quoted
from infini_run.options.grammar import GRAMMAR

_OF_JOBS = ("status", "logs", "cancel", "forget")

_BASH = r"""# bash completion for infini-job. Made from the tables of flags by share/generate.py.
# Needs nothing but bash 4.0.

_infini_job_flags() { # those of a verb; after `=` they have a value
    case $1 in
@FLAGS@
    esac
}

_infini_job_values() { # the words that a flag's value can be
    case $1 in
@CASES@
    esac
}

_infini_job_jobs() { # by their directories
    local folder=${INFINI_JOB_DIR:-~/.infini-run/jobs} path
    for path in "$folder"/ir-*; do if [[ -d $path ]]; then echo "${path##*/}"; fi; done
}

_infini_job() {
    local cur=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]} verb=${COMP_WORDS[1]} name i
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then mapfile -t COMPREPLY < <(compgen -W "@VERBS@" -- "$cur"); return; fi
    if [[ $cur == = ]]; then name=$before cur=; elif [[ $before == = ]]; then name=${COMP_WORDS[COMP_CWORD - 2]}; fi
    if [[ -n $name ]]; then
        name=${name#-} name=${name#-}
        mapfile -t COMPREPLY < <(compgen -W "$(_infini_job_values "${name//-/_}")" -- "$cur")
        if ((${#COMPREPLY[@]} == 0)); then compopt -o default 2>/dev/null; fi
        return
    fi
    if [[ $verb == submit ]]; then
        for ((i = 2; i < COMP_CWORD; i++)); do # behind the program nothing is ours
            if [[ ${COMP_WORDS[i]} == -- ]]; then compopt -o default -o bashdefault 2>/dev/null; return; fi
        done
    fi
    if [[ $cur == -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$(_infini_job_flags "$verb")" -- "$cur")
        if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *= ]]; then compopt -o nospace 2>/dev/null; fi
    elif [[ " @OF_JOBS@ " == *" $verb "* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$(_infini_job_jobs)" -- "$cur")
    elif [[ $verb == submit ]]; then
        compopt -o default -o bashdefault 2>/dev/null
    fi
}

complete -F _infini_job infini-job
"""

_ZSH = r"""#compdef infini-job
# zsh completion for infini-job. Made from the tables of flags by share/generate.py.

_infini_job_jobs() {
    local folder=${INFINI_JOB_DIR:-~/.infini-run/jobs}
    local -a jobs=($folder/ir-*(N/:t))
    _describe job jobs
}

_infini_job() {
    local context state line
    local -a verbs=(
@VERBS@
    )
    _arguments -C '1:verb:->verb' '*::argument:->rest'
    if [[ $state == verb ]]; then _describe verb verbs; return; fi
    case $line[1] in
@CASES@
    esac
}

if [[ $funcstack[1] == _infini-job ]]; then # autoloaded, by the name of its file
    _infini_job "$@"
else
    compdef _infini_job infini-job
fi
"""


_FISH = (
    r"""# fish completion for infini-job. Made from the tables of flags by share/generate.py.

"""
    + FUNCTIONS
    + r"""
function @NAME@_offer --argument-names name value prefix # what the value of a flag can be; else a file
    switch $name
@CASES@
        case '*'
            @NAME@_say $prefix (@NAME@_files $value)
    end
end

function @NAME@_flags --argument-names verb current
    switch $verb
@FLAGS@
    end
    if string match -qr -- '^-*no' $current
        switch $verb
@NEGATED@
        end
    end
end

function @NAME@_jobs # by their directories
    set -q INFINI_JOB_DIR; or set -l INFINI_JOB_DIR ~/.infini-run/jobs
    for path in $INFINI_JOB_DIR/ir-*/
        basename $path
    end
end

function @NAME@_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    set -l last (count $words)
    set -l verb $words[2]
    if test $last -eq 1
        printf '%s\t%s\n' \
@VERBS@
        return
    end
    set -l i 3
    while test $i -le $last
        set -l word $words[$i]
        if test "$verb" = submit -a "$word" = --
            @NAME@_program $words[(math $i + 1)..-1]
            return
        end
        if test "$verb" = submit; and not string match -q -- '-?*' $word
            @NAME@_program $words[$i..-1]
            return
        end
        if string match -q -- '-?*' $word
            set -l name (string replace -r -- '^-*' '' $word | string replace -a -- - _)
            if contains -- $name @VALUED@
                if test $i -eq $last
                    @NAME@_offer $name "$current" ''
                    return
                end
                set i (math $i + 1)
            end
        end
        set i (math $i + 1)
    end
    if string match -q -- '-*=*' $current
        set -l parts (string split -m 1 = -- $current)
        set -l name (string replace -r -- '^-*' '' $parts[1] | string replace -a -- - _)
        @NAME@_offer $name "$parts[2]" "$parts[1]="
    else if string match -q -- '-*' $current
        @NAME@_flags $verb $current | @NAME@_names $current
    else if contains -- $verb @OF_JOBS@
        @NAME@_jobs
    else if test "$verb" = submit
        @NAME@_program
    end
end

complete -c infini-job -f -k -a '(@NAME@_complete)'
"""
)


def script(shell: str) -> str:
    """What bash, zsh or fish reads."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell]()


def _bash() -> str:
    flags = []
    for verb, table in VERBS.items():
        names = [f"--{name}{'' if flag.bare is not None else '='}" for flag in (*table, *GRAMMAR)
                 for name in (flag.name, *flag.aliases) if len(name) > 1]  # fmt: skip
        flags.append(f"    {verb}) echo '{' '.join(names)}' ;;")
    known = {flag.name: (flag, values(flag)) for table in VERBS.values() for flag in table}
    cases = [
        f"    {'|'.join((name, *flag.aliases))}) echo '{' '.join(words)}' ;;"
        for name, (flag, words) in known.items()
        if words
    ]
    text = _BASH.replace("@FLAGS@", "\n".join(flags)).replace("@CASES@", "\n".join(cases))
    return text.replace("@VERBS@", " ".join(VERBS)).replace("@OF_JOBS@", " ".join(_OF_JOBS))


def _zsh() -> str:
    verbs = "\n".join(f"        '{verb}:{text.replace(':', chr(92) + ':')}'" for verb, text in SHORT.items())
    cases = []
    for verb, table in VERBS.items():
        specs = [spec for flag in (*table, *GRAMMAR) for spec in zsh_specs(flag)]
        if verb == "submit":
            specs += ["'1:program:_command_names -e'", "'*::argument:_normal'"]
        elif verb in _OF_JOBS:
            specs.append("'*:job:_infini_job_jobs'")
        body = " \\\n".join(f"            {spec}" for spec in specs)
        stop = " -A '-*'" if verb == "submit" else ""
        cases.append(f"    {verb})\n        _arguments -S{stop} \\\n{body}\n        ;;")
    return _ZSH.replace("@VERBS@", verbs).replace("@CASES@", "\n".join(cases))


def _fish() -> str:
    known = {flag.name: flag for table in VERBS.values() for flag in (*table, *GRAMMAR)}
    valued = [name for flag in known.values() if flag.bare is None for name in (flag.name, *flag.aliases)]
    filled = {
        "CASES": fish_cases(known.values()),
        "FLAGS": _fish_names(is_negated=False),
        "NEGATED": _fish_names(is_negated=True),
        "VERBS": " \\\n".join(f"            {verb} {fish_quoted(text)}" for verb, text in SHORT.items()),
        "VALUED": " ".join(valued),
        "OF_JOBS": " ".join(_OF_JOBS),
        "NAME": "__infini_job",
    }
    return fill(_FISH, filled)


def _fish_names(*, is_negated: bool) -> str:
    """The flags of each verb, as cases of a switch."""
    return "\n".join(
        f"        case {verb}\n            printf '%s\\t%s\\n' \\\n"
        f"{fish_names((*table, *GRAMMAR), is_negated=is_negated)}"
        for verb, table in VERBS.items()
    )
