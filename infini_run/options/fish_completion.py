"""What makes fish complete our flags, out of the table of flags; the script stands alone.

One function finds every completion, because flags end where the program begins: what fish has for options knows no
such place.
"""

from __future__ import annotations

from infini_run.options.completed_values import completed_flags, kind, names_with_value, spellings, values
from infini_run.options.grammar import Flag

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_KINDS = {
    "file": "@NAME@_say $prefix (@NAME@_files $value)",
    "folder": "@NAME@_say $prefix (__fish_complete_directories $value '')",
    "variables": "@NAME@_say $prefix(string match -r -- '.*,' $value; or echo) (set -nx)",
    "signal": "@NAME@_say $prefix (command kill -l | string split -n ' ')",
}

# What the scripts of both commands have in common.
FUNCTIONS = r"""function @NAME@_say --argument-names prefix # the other words, each with that prefix
    for word in $argv[2..-1]
        printf '%s%s\n' $prefix $word
    end
end

function @NAME@_files --argument-names start # as fish completes them for a command that it does not know
    complete -C "'' $start"
end

function @NAME@_program # `$argv` is the program and its arguments so far, but the word to complete
    set -l current (commandline -ct)
    if set -q argv[1]
        complete -C (string join ' ' -- (string escape -- $argv) "$current")
    else if not string match -q -- '-*' $current
        @NAME@_files "$current"
        if test -n "$current"; and not string match -q -- '*/*' $current
            complete -C $current
        end
    end
end

function @NAME@_names --argument-names current # of lines `name TAB text`, spelled as what is typed
    set -l dashes (string match -r -- '^-*' $current)
    set -l body (string replace -r -- '^-*' '' $current)
    while read -l line
        if string match -q -- '*-*' $body
            set line (string replace -ra -- '_(?=[^\t]*\t)' '-' $line)
        end
        echo $dashes$line
    end
end
"""

_FISH = (
    r"""# fish completion for infini-run. Made from the table of flags by share/generate.py.

"""
    + FUNCTIONS
    + r"""
function @NAME@_offer --argument-names name value prefix # what the value of a flag can be
    switch $name
@CASES@
    end
end

function @NAME@_flags --argument-names current
    printf '%s\t%s\n' \
@FLAGS@
    if string match -qr -- '^-*no' $current
        printf '%s\t%s\n' \
@NEGATED@
    end
end

function @NAME@_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    set -l last (count $words)
    set -l i 2
    while test $i -le $last
        set -l word $words[$i]
        if test "$word" = --
            @NAME@_program $words[(math $i + 1)..-1]
            return
        end
        if not string match -q -- '-?*' $word
            @NAME@_program $words[$i..-1]
            return
        end
        set -l name (string replace -r -- '^-*' '' $word | string replace -a -- - _)
        if contains -- $name @VALUED@
            if test $i -eq $last
                @NAME@_offer $name "$current" ''
                return
            end
            set i (math $i + 1)
        end
        set i (math $i + 1)
    end
    if not string match -q -- '-*' $current
        @NAME@_program
    else if string match -q -- '*=*' $current
        set -l parts (string split -m 1 = -- $current)
        set -l name (string replace -r -- '^-*' '' $parts[1] | string replace -a -- - _)
        @NAME@_offer $name "$parts[2]" "$parts[1]="
    else
        @NAME@_flags $current | @NAME@_names $current
    end
end

complete -c infini-run -f -k -a '(@NAME@_complete)'
"""
)


def fish_script() -> str:
    """What fish reads for infini-run."""
    flags = completed_flags()
    filled = {
        "CASES": fish_cases(flags),
        "FLAGS": fish_names(flags),
        "NEGATED": fish_names(flags, is_negated=True),
        "VALUED": " ".join(names_with_value()),
        "NAME": "__infini_run",
    }
    return fill(_FISH, filled)


def fill(text: str, filled: dict[str, str]) -> str:
    """Put each text in the place of its @NAME@, in this order."""
    for name, content in filled.items():
        text = text.replace(f"@{name}@", content)
    return text


def fish_cases(flags: Iterable[Flag]) -> str:
    """The cases of a switch over names of flags: what their values can be."""
    cases = []
    for flag in flags:
        commands = [f"@NAME@_say $prefix {' '.join(map(fish_quoted, values(flag)))}"] if values(flag) else []
        commands += [_KINDS[kind(flag)]] if kind(flag) else []
        if commands:
            lines = [f"case {' '.join((flag.name, *flag.aliases))}", *(f"    {command}" for command in commands)]
            cases += [f"        {line}" for line in lines]
    return "\n".join(cases)


def fish_names(flags: Iterable[Flag], *, is_negated: bool = False) -> str:
    """Pairs of words for printf: a name, with `=` where a value follows, and its text; or those with `no` before."""
    if is_negated:
        pairs = [
            (f"no{name}", f"not: {_short(flag)}")
            for flag in flags
            if flag.negated is not None
            for name in spellings(flag)
        ]
    else:
        pairs = [
            (name + ("" if flag.bare is not None else "="), _short(flag))
            for flag in flags
            for name in spellings(flag)
        ]
    return " \\\n".join(f"        {name} {fish_quoted(text)}" for name, text in pairs)


def _short(flag: Flag) -> str:
    return flag.help.partition(";")[0]


def fish_quoted(text: str) -> str:
    """As fish reads it: in single quotes it knows two escapes (fish, Quotes)."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
