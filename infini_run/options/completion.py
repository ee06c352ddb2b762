"""Completion of this package's commands in bash, zsh, and fish, out of the tables of flags; the scripts stand alone.

It completes names in both spellings, and values from a fixed set. It also completes files, folders, variables, and
signals where a flag takes those. From the program on, the shell completes as without this package.
"""

from __future__ import annotations

from infini_run.options.completed_values import RUN, CompletedCommand, completed_flags, kind, spellings, values
from infini_run.options.fish_completion import fish_script
from infini_run.options.grammar import Flag, metavar

SHELLS = ("bash", "zsh", "fish")


def script(shell: str, command: CompletedCommand = RUN) -> str:
    """Return the text of `--completion=SHELL`."""
    return {"bash": _bash, "zsh": _zsh, "fish": fish_script}[shell](command)


# ---- bash

_BASH = r"""# bash completion for @COMMAND@. Made from the table of flags by share/generate.py.
# Needs nothing but bash 4.0; where bash-completion is, the program's own completion is used from the program on.

@OWN@_values() { # the words that a flag's value can be; and in `kind` what else
    kind=
    case $1 in
@CASES@
    *) return 1 ;;
    esac
}

@OWN@_offer() { # what a value can be, of which `$2` is there
    local kind words head=
    words=$(@OWN@_values "$1"; echo "/$kind")
    kind=${words##*/} words=${words%/*}
    if [[ $kind == variables && $2 == *,* ]]; then head=${2%,*},; fi
    case $kind in
    file) mapfile -t COMPREPLY < <(compgen -f -- "$2"); compopt -o filenames 2>/dev/null ;;
    folder) mapfile -t COMPREPLY < <(compgen -d -- "$2"); compopt -o filenames 2>/dev/null ;;
    variables) mapfile -t COMPREPLY < <(compgen -P "$head" -e -- "${2##*,}") ;;
    signal) mapfile -t COMPREPLY < <(compgen -W "$(compgen -A signal SIG | sed 's/^SIG//')" -- "${2#SIG}") ;;
    *) mapfile -t COMPREPLY < <(compgen -W "$words" -- "$2") ;;
    esac
}

@OWN@_names() { # the flags of verb `$1` of which `$2` is the beginning, as it is spelled
    local dashes=${2%%[!-]*} body=${2##*(-)} names= negated=
    case $1 in
@NAMES@
    esac
    if [[ $body == no* ]]; then names+=" $negated"; fi
    if [[ $body == *-* ]]; then names=${names//_/-} body=${body//_/-}; fi
    mapfile -t COMPREPLY < <(compgen -P "$dashes" -W "$names" -- "$body")
    if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *= ]]; then compopt -o nospace 2>/dev/null; fi
}

@OWN@_program() { # `$1` is where the program stands: from there on it is another command's line
    local complete
    if (($1 == COMP_CWORD)); then
        mapfile -t COMPREPLY < <(compgen -f -- "$cur")
        if [[ -n $cur && $cur != */* ]]; then
            mapfile -t -O ${#COMPREPLY[@]} COMPREPLY < <(compgen -c -- "$cur" | sort -u)
        fi
        compopt -o filenames 2>/dev/null
        return
    fi
    for complete in _comp_command_offset _command_offset; do
        if declare -F $complete >/dev/null; then $complete "$1"; return; fi
    done
    compopt -o default -o bashdefault 2>/dev/null
}

@IF_JOBS@@OWN@() {
    local i=@FIRST@ verb=@VERB@ word name cur=${COMP_WORDS[COMP_CWORD]} glued= restore
    restore=$(shopt -p extglob); shopt -s extglob
    COMPREPLY=()
@IF_VERBS@    while ((i < COMP_CWORD)); do
        word=${COMP_WORDS[i]}
        if [[ $word == -- ]]; then ((i++)); break; fi
        if [[ $word != -?* && " @PROGRAM@ " == *" $verb "* ]]; then break; fi
        name=${word%%=*} name=${name##*(-)} name=${name//-/_}
        if [[ $word != -?* || $word == *=* ]]; then # "=" does not part words here (COMP_WORDBREAKS)
            ((i++)); continue
        fi
        if [[ ${COMP_WORDS[i + 1]} == "=" ]]; then
            if ((i + 1 == COMP_CWORD)); then cur=; fi
            if ((i + 2 >= COMP_CWORD)); then @OWN@_offer "$name" "$cur"; $restore; return; fi
            ((i += 3)); continue
        fi
        if [[ " @VALUED@ " == *" $name "* ]]; then
            if ((i + 1 == COMP_CWORD)); then @OWN@_offer "$name" "$cur"; $restore; return; fi
            ((i += 2)); continue
        fi
        ((i++))
    done
    if ((i < COMP_CWORD)) || [[ $cur != -* || ${COMP_WORDS[i - 1]} == -- ]]; then
        case $verb in
@WORDS@
        esac
    elif [[ $cur == *=* ]]; then
        name=${cur%%=*} glued=$name= name=${name##*(-)}
        @OWN@_offer "${name//-/_}" "${cur#*=}"
        COMPREPLY=("${COMPREPLY[@]/#/$glued}")
    else
        @OWN@_names "$verb" "$cur"
    fi
    $restore
}

complete -F @OWN@ @COMMAND@
"""

_BASH_JOBS = r"""@OWN@_jobs() { # by their directories
    local folder=${INFINI_JOB_DIR:-~/.infini-run/jobs} path
    for path in "$folder"/ir-*; do if [[ -d $path ]]; then echo "${path##*/}"; fi; done
}

"""

_BASH_VERBS = """\
    if ((COMP_CWORD == 1)); then mapfile -t COMPREPLY < <(compgen -W "@VERBS@" -- "$cur"); $restore; return; fi
"""

_BASH_WORDS = {
    "program": """@OWN@_program "$i" ;;""",
    "jobs": """mapfile -t COMPREPLY < <(compgen -W "$(@OWN@_jobs)" -- "$cur") ;;""",
}


def _bash(command: CompletedCommand) -> str:
    cases = []
    for flag in command.all_flags():
        words, other = " ".join(values(flag)), kind(flag)
        commands = [f"echo '{words}'"] if words else []
        commands += [f"kind={other}"] if other else []
        if commands:
            cases.append(f"    {'|'.join((flag.name, *flag.aliases))}) {'; '.join(commands)} ;;")
    return command.fill(
        _BASH,
        verb="${COMP_WORDS[1]}",
        verbs=_BASH_VERBS.replace("@VERBS@", " ".join(command.verbs)),
        jobs=_BASH_JOBS,
        CASES="\n".join(cases),
        NAMES="\n".join(_bash_names(command, verb) for verb in command.flags),
        WORDS="\n".join(f"        {'|'.join(verbs)}) {_BASH_WORDS[words]}" for words, verbs in command.words.items()),
    )


def _bash_names(command: CompletedCommand, verb: str) -> str:
    flags = completed_flags(command, verb)
    names = [name + ("" if flag.bare is not None else "=") for flag in flags for name in spellings(flag)]
    negated = ["no" + name for flag in flags if flag.negated is not None for name in spellings(flag)]
    return f'    {verb}) names="{" ".join(names)}" negated="{" ".join(negated)}" ;;'


# ---- zsh

_ZSH_ACTIONS = {
    "file": "_files",
    "folder": "_files -/",
    "variables": "_sequence _parameters -g '*export*'",
    "signal": "_signals",
}

_ZSH = r"""#compdef @COMMAND@
# zsh completion for @COMMAND@. Made from the table of flags by share/generate.py.

@OWN@_program() {
    _alternative 'files:file:_files' 'commands:command:_command_names -e'
}

@IF_JOBS@@OWN@() {
@IF_VERBS@    case @VERB@ in
@CASES@
    esac
}

if [[ $funcstack[1] == _@COMMAND@ ]]; then # autoloaded, by the name of its file
    @OWN@ "$@"
else # eval "$(@COMMAND@ --completion=zsh)"
    compdef @OWN@ @COMMAND@
fi
"""

_ZSH_JOBS = """@OWN@_jobs() {
    local folder=${INFINI_JOB_DIR:-~/.infini-run/jobs}
    local -a jobs=($folder/ir-*(N/:t))
    _describe job jobs
}

"""

_ZSH_VERBS = """\
    local context state line
    local -a verbs=(
@VERBS@
    )
    _arguments -C '1:verb:->verb' '*::argument:->rest'
    if [[ $state == verb ]]; then _describe verb verbs; return; fi
"""

_ZSH_WORDS = {
    "program": ("'1:program:@OWN@_program'", "'*::argument:_normal'"),
    "jobs": ("'*:job:@OWN@_jobs'",),
}


def _zsh(command: CompletedCommand) -> str:
    verbs = "\n".join(f"        '{verb}:{_zsh_text(text)}'" for verb, text in command.verbs.items())
    return command.fill(
        _ZSH,
        verb="$line[1]",
        verbs=_ZSH_VERBS.replace("@VERBS@", verbs),
        jobs=_ZSH_JOBS,
        CASES="\n".join(_zsh_case(command, verb) for verb in command.flags),
    )


def _zsh_case(command: CompletedCommand, verb: str) -> str:
    specs = [spec for flag in completed_flags(command, verb) for spec in _zsh_specs(flag)]
    specs += [spec for words, verbs in command.words.items() if verb in verbs for spec in _ZSH_WORDS[words]]
    lines = " \\\n".join(f"            {spec}" for spec in specs)
    stop = " -A '-*'" if verb in command.words["program"] else ""
    return f"    {verb})\n        _arguments -S{stop} -M 'm:{{_-}}={{-_}} r:|[_-]=* r:|=*' \\\n{lines}\n        ;;"


def _zsh_specs(flag: Flag) -> list[str]:
    """Return one spec per spelling: `'--name=[help]:METAVAR:action'`."""
    text = _zsh_text(flag.help.partition(";")[0])
    value = f":{_zsh_text(metavar(flag))}:{_zsh_action(flag)}"
    specs = []
    for name in (flag.name, *flag.aliases):
        dashes = "--" if len(name) > 1 else "-"
        if flag.bare is None:
            specs.append(f"'*{dashes}{name}=[{text}]{value}'")
        else:
            specs.append(
                f"'*{dashes}{name}{'=-' if flag.metavar else ''}[{text}]{':' + value if flag.metavar else ''}'"
            )
        if flag.negated is not None and len(name) > 1:
            specs.append(f"'*--no{name}[not\\: {text}]'")
    return specs


def _zsh_action(flag: Flag) -> str:
    words, other = values(flag), kind(flag)
    if words:
        return f"({' '.join(words)})"
    return _ZSH_ACTIONS[other].replace("'", "'\\''") if other else " "


def _zsh_text(text: str) -> str:
    """Escape a text inside a spec, and inside quotes."""
    for letter in "\\:[]":
        text = text.replace(letter, "\\" + letter)
    return text.replace("'", "'\\''")
