"""Completion of this package's flags in fish, out of the table of flags; the script stands alone.

One function finds every completion, because flags end where the program begins: what fish has for options knows no
such place.
"""

from __future__ import annotations

from infini_run.options.completed_values import CompletedCommand, completed_flags, kind, spellings, values
from infini_run.options.grammar import Flag

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_KINDS = {
    "file": "_@OWN@_say $prefix (_@OWN@_files $value)",
    "folder": "_@OWN@_say $prefix (__fish_complete_directories $value '')",
    "variables": "_@OWN@_say $prefix(string match -r -- '.*,' $value; or echo) (set -nx)",
    "signal": "_@OWN@_say $prefix (command kill -l | string split -n ' ')",
}

_FISH = r"""# fish completion for @COMMAND@. Made from the table of flags by share/generate.py.

function _@OWN@_say --argument-names prefix # the other words, each with that prefix
    for word in $argv[2..-1]
        printf '%s%s\n' $prefix $word
    end
end

function _@OWN@_files --argument-names start # as fish completes them for a command that it does not know
    complete -C "'' $start"
end

function _@OWN@_program # `$argv` is the program and its arguments so far, but the word to complete
    set -l current (commandline -ct)
    if set -q argv[1]
        complete -C (string join ' ' -- (string escape -- $argv) "$current")
    else if not string match -q -- '-*' $current
        _@OWN@_files "$current"
        if test -n "$current"; and not string match -q -- '*/*' $current
            complete -C $current
        end
    end
end

function _@OWN@_names --argument-names current # of lines `name TAB text`, spelled as what is typed
    set -l dashes (string match -r -- '^-*' $current)
    set -l body (string replace -r -- '^-*' '' $current)
    while read -l line
        if string match -q -- '*-*' $body
            set line (string replace -ra -- '_(?=[^\t]*\t)' '-' $line)
        end
        echo $dashes$line
    end
end

function _@OWN@_offer --argument-names name value prefix # what the value of a flag can be
    switch $name
@CASES@
    end
end

function _@OWN@_flags --argument-names verb current
    switch $verb
@FLAGS@
    end
    if string match -qr -- '^-*no' $current
        switch $verb
@NEGATED@
        end
    end
end

@IF_JOBS@function _@OWN@_words --argument-names verb # what follows the flags
    switch $verb
@WORDS@
    end
end

function _@OWN@_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    set -l last (count $words)
    set -l verb @VERB@
@IF_VERBS@    set -l i (math @FIRST@ + 1) # fish counts from 1
    while test $i -le $last
        set -l word $words[$i]
        if test "$word" = --
            _@OWN@_words $verb $words[(math $i + 1)..-1]
            return
        end
        if not string match -q -- '-?*' $word; and contains -- $verb @PROGRAM@
            _@OWN@_program $words[$i..-1]
            return
        end
        set -l name (string replace -r -- '^-*' '' $word | string replace -a -- - _)
        if string match -q -- '-*' $word; and contains -- $name @VALUED@
            if test $i -eq $last
                _@OWN@_offer $name "$current" ''
                return
            end
            set i (math $i + 1)
        end
        set i (math $i + 1)
    end
    if not string match -q -- '-*' $current
        _@OWN@_words $verb
    else if string match -q -- '*=*' $current
        set -l parts (string split -m 1 = -- $current)
        set -l name (string replace -r -- '^-*' '' $parts[1] | string replace -a -- - _)
        _@OWN@_offer $name "$parts[2]" "$parts[1]="
    else
        _@OWN@_flags $verb $current | _@OWN@_names $current
    end
end

complete -c @COMMAND@ -f -k -a '(_@OWN@_complete)'
"""

_JOBS = """function _@OWN@_jobs # by their directories
    set -q INFINI_JOB_DIR; or set -l INFINI_JOB_DIR ~/.infini-run/jobs
    for path in $INFINI_JOB_DIR/ir-*/
        basename $path
    end
end

"""

_VERBS = r"""    if test $last -eq 1
        printf '%s\t%s\n' \
@VERBS@
        return
    end
"""

_WORDS = {"program": "_@OWN@_program $argv[2..-1]", "jobs": "_@OWN@_jobs"}


def fish_script(command: CompletedCommand) -> str:
    """Return what fish reads for a command."""
    verbs = " \\\n".join(f"            {verb} {_quoted(text)}" for verb, text in command.verbs.items())
    return command.fill(
        _FISH,
        verb='"$words[2]"',
        verbs=_VERBS.replace("@VERBS@", verbs),
        jobs=_JOBS,
        CASES=_cases(command.all_flags()),
        FLAGS=_names_by_verb(command, _names),
        NEGATED=_names_by_verb(command, _negated),
        WORDS="\n".join(
            f"        case {' '.join(verbs)}\n            {_WORDS[words]}" for words, verbs in command.words.items()
        ),
    )


def _cases(flags: Iterable[Flag]) -> str:
    """Return the cases of a switch over names of flags: what their values can be."""
    cases = []
    for flag in flags:
        commands = [f"_@OWN@_say $prefix {' '.join(map(_quoted, values(flag)))}"] if values(flag) else []
        commands += [_KINDS[kind(flag)]] if kind(flag) else []
        if commands:
            lines = [f"case {' '.join((flag.name, *flag.aliases))}", *(f"    {command}" for command in commands)]
            cases += [f"        {line}" for line in lines]
    return "\n".join(cases)


def _names_by_verb(command: CompletedCommand, names: Callable[[Flag], list[tuple[str, str]]]) -> str:
    """Return the cases of a switch over verbs: pairs of words for printf, of a name and its text."""
    cases = []
    for verb in command.flags:
        pairs = [pair for flag in completed_flags(command, verb) for pair in names(flag)]
        lines = " \\\n".join(f"                {name} {_quoted(text)}" for name, text in pairs)
        cases.append(f"        case {verb}\n            printf '%s\\t%s\\n' \\\n{lines}")
    return "\n".join(cases)


def _names(flag: Flag) -> list[tuple[str, str]]:
    """Return the names, with `=` where a value follows."""
    return [(name + ("" if flag.bare is not None else "="), _short(flag)) for name in spellings(flag)]


def _negated(flag: Flag) -> list[tuple[str, str]]:
    """Return the names with `no` before."""
    return [(f"no{name}", f"not: {_short(flag)}") for name in spellings(flag) if flag.negated is not None]


def _short(flag: Flag) -> str:
    return flag.help.partition(";")[0]


def _quoted(text: str) -> str:
    """Quote a text for fish: in single quotes it knows two escapes (fish, Quotes)."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
