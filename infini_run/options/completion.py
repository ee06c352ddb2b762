"""What makes bash, zsh and fish complete our flags, out of the table of flags; the scripts stand alone.

Names in both spellings, values where only some are allowed, files, folders, variables and signals where those are
asked for; from the program on, whatever the shell would complete without us.
"""

from __future__ import annotations

from infini_run.options.completed_values import completed_flags, kind, names_with_value, spellings, values
from infini_run.options.fish_completion import fish_script
from infini_run.options.grammar import Flag, metavar

SHELLS = ("bash", "zsh", "fish")


def script(shell: str) -> str:
    """The text of `--completion=SHELL`."""
    return {"bash": _bash, "zsh": _zsh, "fish": fish_script}[shell]()


# ---- bash

_BASH = r"""# bash completion for infini-run. Made from the table of flags by share/generate.py.
# Needs nothing but bash 4.0; where bash-completion is, the program's own completion is used from the program on.

_infini_run_values() { # the words that a flag's value can be; and in `kind` what else
    kind=
    case $1 in
@CASES@
    *) return 1 ;;
    esac
}

_infini_run_offer() { # what a value can be, of which `$2` is there
    local kind words head=
    words=$(_infini_run_values "$1"; echo "/$kind")
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

_infini_run_names() { # the flags of which `$1` is the beginning, as it is spelled
    local dashes=${1%%[!-]*} body=${1##*(-)} names
    names="@NAMES@"
    if [[ $body == no* ]]; then names+=" @NEGATED@"; fi
    if [[ $body == *-* ]]; then names=${names//_/-} body=${body//_/-}; fi
    mapfile -t COMPREPLY < <(compgen -P "$dashes" -W "$names" -- "$body")
    if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *= ]]; then compopt -o nospace 2>/dev/null; fi
}

_infini_run_program() { # `$1` is where the program stands: from there on it is another command's line
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

_infini_run() {
    local i=1 word name cur=${COMP_WORDS[COMP_CWORD]} glued= restore
    restore=$(shopt -p extglob); shopt -s extglob
    COMPREPLY=()
    while ((i < COMP_CWORD)); do
        word=${COMP_WORDS[i]}
        if [[ $word == -- ]]; then ((i++)); break; fi
        if [[ $word != -?* ]]; then break; fi
        name=${word%%=*} name=${name##*(-)} name=${name//-/_}
        if [[ $word == *=* ]]; then ((i++)); continue; fi # "=" does not part words here (COMP_WORDBREAKS)
        if [[ ${COMP_WORDS[i + 1]} == "=" ]]; then
            if ((i + 1 == COMP_CWORD)); then cur=; fi
            if ((i + 2 >= COMP_CWORD)); then _infini_run_offer "$name" "$cur"; $restore; return; fi
            ((i += 3)); continue
        fi
        if [[ " @VALUED@ " == *" $name "* ]]; then
            if ((i + 1 == COMP_CWORD)); then _infini_run_offer "$name" "$cur"; $restore; return; fi
            ((i += 2)); continue
        fi
        ((i++))
    done
    if ((i < COMP_CWORD)) || [[ $cur != -* || ${COMP_WORDS[i - 1]} == -- ]]; then
        _infini_run_program "$i"
    elif [[ $cur == *=* ]]; then
        name=${cur%%=*} glued=$name= name=${name##*(-)}
        _infini_run_offer "${name//-/_}" "${cur#*=}"
        COMPREPLY=("${COMPREPLY[@]/#/$glued}")
    else
        _infini_run_names "$cur"
    fi
    $restore
}

complete -F _infini_run infini-run
"""


def _bash() -> str:
    flags, cases = completed_flags(), []
    for flag in flags:
        words, other = " ".join(values(flag)), kind(flag)
        commands = [f"echo '{words}'"] if words else []
        commands += [f"kind={other}"] if other else []
        if commands:
            cases.append(f"    {'|'.join((flag.name, *flag.aliases))}) {'; '.join(commands)} ;;")
    names = [name + ("" if flag.bare is not None else "=") for flag in flags for name in spellings(flag)]
    negated = ["no" + name for flag in flags if flag.negated is not None for name in spellings(flag)]
    filled = {
        "CASES": "\n".join(cases),
        "NAMES": " ".join(names),
        "NEGATED": " ".join(negated),
        "VALUED": " ".join(names_with_value()),
    }
    text = _BASH
    for name, content in filled.items():
        text = text.replace(f"@{name}@", content)
    return text


# ---- zsh

_ZSH_ACTIONS = {
    "file": "_files",
    "folder": "_files -/",
    "variables": "_sequence _parameters -g '*export*'",
    "signal": "_signals",
}

_ZSH = r"""#compdef infini-run
# zsh completion for infini-run. Made from the table of flags by share/generate.py.

_infini_run_program() {
    _alternative 'files:file:_files' 'commands:command:_command_names -e'
}

_infini_run() {
    _arguments -S -A '-*' -M 'm:{_-}={-_} r:|[_-]=* r:|=*' \
@SPECS@
        '1:program:_infini_run_program' \
        '*::argument:_normal'
}

if [[ $funcstack[1] == _infini-run ]]; then # autoloaded, by the name of its file
    _infini_run "$@"
else # eval "$(infini-run --completion=zsh)"
    compdef _infini_run infini-run
fi
"""


def _zsh() -> str:
    specs = [spec for flag in completed_flags() for spec in zsh_specs(flag)]
    return _ZSH.replace("@SPECS@", "\n".join(f"        {spec} \\" for spec in specs))


def zsh_specs(flag: Flag) -> list[str]:
    """One for each spelling: `'--name=[help]:METAVAR:action'`."""
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
    """Inside a spec, and inside quotes."""
    for letter in "\\:[]":
        text = text.replace(letter, "\\" + letter)
    return text.replace("'", "'\\''")
