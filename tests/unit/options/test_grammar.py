"""The gflags grammar over a table of its own: nothing here is a flag of infini-run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_run.errors import UsageError
from infini_run.options.grammar import Flag, Prefix, boolean, index, parse, plain, switch
from infini_run.options.hints import nearest


def whole(text):
    try:
        return int(text)
    except ValueError:
        raise ValueError("expected a whole number") from None


FLAGS = (
    Flag(name="node_rank", group="g", kind=whole, default=0, help="", metavar="N"),
    Flag(name="log_dir", group="g", kind=plain, default="", help="", metavar="DIR"),
    Flag(
        name="console",
        group="g",
        kind=plain,
        default="inherit",
        help="",
        choices=("inherit", "prefix", "none"),
    ),
    Flag(name="grace", group="g", kind=plain, default="", help="", aliases=("shutdown_timeout", "g")),
    Flag(name="show", group="g", kind=plain, default="", help="", bare="text", negated=""),
    Flag(name="bind", group="g", kind=lambda text: tuple(text.split()), default=(), help="", adds=True),
    switch("verbose", "g", "", aliases=("v",)),
    switch("no_python", "g", ""),
)
TABLE = index(FLAGS)
PREFIXES = (Prefix(text="OURS_"), Prefix(text="PET_", is_binary=True))
words = st.lists(st.text() | st.sampled_from(["--", "-", "--verbose", "--log_dir", "--log_dir=x", "--help", "-1"]))


def read(*argv, **environ):
    return parse(argv, environ, TABLE, PREFIXES)


def values(*argv, **environ):
    return {name: setting.value for name, setting in read(*argv, **environ).settings.items()}


def refused(*argv, **environ):
    with pytest.raises(UsageError) as caught:
        read(*argv, **environ)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    "argv",
    [
        ["--node_rank=3"],
        ["--node_rank", "3"],
        ["-node_rank=3"],
        ["-node_rank", "3"],
        ["--node-rank=3"],
        ["-node-rank", "3"],
    ],
)
def test_a_value_follows_an_equals_sign_or_is_the_next_word_after_one_dash_or_two(argv):
    assert values(*argv) == {"node_rank": 3}


@pytest.mark.parametrize("head", ["-", "--"])
@pytest.mark.parametrize("name", [name for name in TABLE if "_" in name])
def test_dash_and_underscore_are_the_same_in_a_name(head, name):
    value = "" if TABLE[name][2] else "=1"
    underscore = values(head + name + value)
    assert underscore == values(head + name.replace("_", "-") + value)
    assert list(underscore) == [TABLE[name][0].name]


@pytest.mark.parametrize("word", ["true", "t", "1", "yes", "True", "YES"])
def test_a_boolean_can_be_said_to_be_true(word):
    assert values(f"--verbose={word}") == {"verbose": True}


@pytest.mark.parametrize("word", ["false", "f", "0", "no", "False", "NO"])
def test_a_boolean_can_be_said_to_be_false(word):
    assert values(f"--verbose={word}") == {"verbose": False}


def test_a_boolean_alone_is_true_and_with_no_in_front_false():
    assert values("--verbose") == {"verbose": True}
    assert values("-noverbose") == {"verbose": False}
    assert values("--no_python") == values("--no-python") == {"no_python": True}
    assert values("--nono_python") == {"no_python": False}


def test_a_boolean_never_takes_the_next_word():
    parsed = read("--verbose", "false")
    assert parsed.settings["verbose"].value is True
    assert parsed.program == ("false",)


def test_a_flag_with_a_meaning_of_its_own_takes_another_value_only_after_an_equals_sign():
    assert values("--show") == {"show": "text"}
    assert values("--show=json") == {"show": "json"}
    assert values("--noshow") == {"show": ""}
    assert read("--show", "json").program == ("json",)


def test_an_alias_is_the_same_flag():
    assert values("--shutdown-timeout=3") == values("-g", "3") == {"grace": "3"}


def test_the_last_of_two_wins():
    assert values("--node_rank=1", "--node_rank=2") == {"node_rank": 2}
    assert values("--verbose", "--noverbose") == {"verbose": False}


def test_flag_that_adds_has_the_words_of_all(tmp_path):
    file = tmp_path / "flags"
    file.write_text("--bind=/a /b\n")
    assert values(f"--flagfile={file}", "--bind=/c", OURS_BIND="/d") == {"bind": ("/a", "/b", "/c")}
    assert values(OURS_BIND="/d") == {"bind": ("/d",)}


@given(st.integers())
def test_a_negative_number_is_a_value(number):
    assert values("--node_rank", str(number)) == values(f"--node_rank={number}") == {"node_rank": number}


def test_a_value_may_be_empty_or_hold_equals_signs_and_dashes():
    assert values("--log_dir=") == {"log_dir": ""}
    assert values("--log_dir=a=b") == {"log_dir": "a=b"}
    assert values("--log_dir", "-x-") == {"log_dir": "-x-"}
    assert values("--log_dir=--verbose") == {"log_dir": "--verbose"}


@given(words)
def test_nothing_after_two_dashes_is_touched(rest):
    for front in ([], ["--verbose"], ["--log_dir=x"]):
        assert read(*front, "--", *rest).program == tuple(rest)


@given(st.text().filter(lambda word: word[:1] != "-" or word == "-"), words)
def test_nothing_from_the_first_word_that_is_no_flag_is_touched(program, rest):
    for front in ([], ["--verbose"], ["--log_dir", "x"]):
        parsed = read(*front, program, *rest)
        assert parsed.program == (program, *rest)
        assert len(parsed.settings) == len(front[:1])


@given(st.lists(st.text() | st.sampled_from(["--log_dir", "--undefok=a", "--a", "--fromenv=show", "--help=0"])))
def test_any_words_are_read_up_to_the_program_or_refused_in_one_printable_line(argv):
    said = ""
    try:
        rest = parse(argv, {}, TABLE).program
        assert list(rest) == argv[len(argv) - len(rest) :]
    except UsageError as error:
        said = str(error)
    assert said.isprintable()


@pytest.mark.parametrize("name", ["--nod", "--node", "--verbos", "--log"])
def test_a_name_is_not_abbreviated(name):
    assert f"unknown flag {name}" in refused(name)


@pytest.mark.parametrize(
    ("given_", "near"),
    [
        ("--node-rnak=1", "--node_rank"),
        ("--logdir=x", "--log_dir"),
        ("--node", "--node_rank"),
        ("--no-verbose", "--noverbose"),
        ("--flagfle=x", "--flagfile"),
    ],
)
def test_an_unknown_flag_is_refused_with_the_nearest_known_one(given_, near):
    text = refused(given_, "program")
    assert text == f"unknown flag {given_.partition('=')[0]}; did you mean {near}?"


def test_an_unknown_flag_far_from_all_points_to_help():
    assert refused("--xyzzy") == "unknown flag --xyzzy; run --help for the list"


def test_an_unknown_flag_is_told_before_what_is_wrong_after_it():
    assert "--xyzzy" in refused("--xyzzy", "--log_dir")


@pytest.mark.parametrize("rest", [[], ["--", "program"]])
def test_a_missing_value_names_the_flag_and_how_to_write_it(rest):
    assert refused("--log-dir", *rest) == "--log-dir: needs a value; use --log-dir=DIR"


def test_a_known_flag_is_not_swallowed_as_a_value():
    text = refused("--log_dir", "--verbose", "program")
    assert text == "--log_dir: needs a value; use --log_dir=DIR (--verbose is a flag)"


def test_a_negation_takes_no_value():
    text = refused("--noverbose=true")
    assert text == "--noverbose=true: cannot take a value; use --verbose=true"


def test_a_bad_value_is_quoted_with_what_is_allowed():
    assert refused("--node-rank", "x") == "--node-rank=x: expected a whole number"
    assert refused("--verbose=maybe") == "--verbose=maybe: expected true or false"
    assert refused("--console=prefx") == "--console=prefx: expected inherit, prefix, or none; did you mean prefix?"
    assert refused("--console=zzzzzz") == "--console=zzzzzz: expected inherit, prefix, or none"


def test_a_bad_value_is_refused_even_where_a_later_one_wins():
    assert "--node_rank=x" in refused("--node_rank=x", "--node_rank=1")


def test_an_unprintable_value_is_escaped():
    assert refused("--node_rank=a\nb") == r"--node_rank='a\nb': expected a whole number"


@pytest.mark.parametrize("name", ["help", "helpfull", "version"])
def test_a_question_stops_the_reading(name):
    assert read(f"--{name}", "--xyzzy").question == name
    assert read(f"--{name}=false", "program").question == ""
    assert read("program", f"--{name}").question == ""


def test_a_question_does_not_hide_an_unknown_flag_before_it():
    assert "--xyzzy" in refused("--xyzzy", "--help")


def test_h_is_help():
    assert read("-h").question == "help"


@pytest.fixture
def flag_file(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return str(path)

    return write


def test_a_flag_file_holds_one_flag_a_line_with_comments(flag_file):
    path = flag_file("job.flags", "# a comment\n\n  --node-rank=3  \r\n\t# another\n-log_dir a b #c\n--noverbose\n")
    assert values(f"--flagfile={path}") == {"node_rank": 3, "log_dir": "a b #c", "verbose": False}


def test_a_flag_file_takes_its_place_in_the_order(flag_file):
    path = flag_file("job.flags", "--node_rank=2")
    assert values("--node_rank=1", f"--flagfile={path}") == {"node_rank": 2}
    assert values(f"--flagfile={path}", "--node_rank=1") == {"node_rank": 1}


def test_a_flag_file_names_another_relative_to_itself(flag_file):
    outer = flag_file("outer.flags", "--flagfile=sub/inner.flags\n--verbose")
    flag_file("sub/inner.flags", "--flagfile=deep.flags\n--log_dir=x")
    flag_file("sub/deep.flags", "--node_rank=5")
    assert values("--flagfile", outer) == {"node_rank": 5, "log_dir": "x", "verbose": True}


def test_a_flag_file_may_be_read_twice(flag_file):
    path = flag_file("a.flags", "--verbose")
    assert values(f"--flagfile={path}", f"--flagfile={path}") == {"verbose": True}


def test_flag_files_in_a_circle_are_refused_naming_the_chain(flag_file):
    a = flag_file("a.flags", "--flagfile=b.flags")
    b = flag_file("b.flags", "--flagfile=./a.flags")
    text = refused(f"--flagfile={a}")
    assert text.startswith(
        f"--flagfile=./a.flags ({b}:1): cannot be read: flag files include each other: {a} -> {b} -> "
    )
    assert text.endswith("a.flags")


def test_a_flag_file_that_names_itself_through_the_environment_is_a_circle(flag_file):
    a = flag_file("a.flags", "--fromenv=flagfile")
    assert "include each other" in refused(f"--flagfile={a}", FLAGS_flagfile=a)


def test_a_flag_file_that_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "none.flags"
    assert refused(f"--flagfile={path}") == f"--flagfile={path}: cannot be read: No such file or directory"
    assert refused(f"--flagfile={tmp_path}") == f"--flagfile={tmp_path}: cannot be read: Is a directory"
    assert "cannot be read" in refused("--flagfile=a\0b")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("program", "expected a flag; use one line per flag"),
        ("--", "expected a flag; use one line per flag"),
        ("--xyzzy", "unknown flag --xyzzy"),
        ("--node_rank=x", "expected a whole number"),
        ("--log_dir", "--log_dir: needs a value; use --log_dir=DIR"),
        ("--verbose --log_dir=x", "cannot take the value from the next word; use --verbose=VALUE"),
    ],
)
def test_what_is_wrong_in_a_flag_file_is_told_with_its_line(flag_file, line, message):
    path = flag_file("job.flags", f"# first\n{line}\n")
    text = refused(f"--flagfile={path}")
    assert message in text
    assert f"({path}:2)" in text


def test_a_question_in_a_flag_file_is_asked(flag_file):
    assert read(f"--flagfile={flag_file('a', '--version')}", "--xyzzy").question == "version"


def test_fromenv_takes_flags_from_the_environment_in_their_place():
    assert values("--node_rank=1", "--fromenv=node-rank,log_dir", FLAGS_node_rank="2", FLAGS_log_dir="") == {
        "node_rank": 2,
        "log_dir": "",
    }
    assert values("--fromenv=node_rank", "--node_rank=1", FLAGS_node_rank="2") == {"node_rank": 1}


def test_fromenv_refuses_what_is_not_set_and_tryfromenv_does_not():
    text = refused("--fromenv=log_dir")
    assert text == "--fromenv=log_dir: missing FLAGS_log_dir; set it, or use --tryfromenv"
    assert values("--tryfromenv=log_dir,node_rank", FLAGS_node_rank="2") == {"node_rank": 2}


def test_fromenv_names_the_variable_of_a_bad_value():
    text = refused("--fromenv=node_rank", FLAGS_node_rank="x")
    assert text == "--node_rank=x (from FLAGS_node_rank): expected a whole number"


def test_fromenv_knows_no_other_flags_than_the_command_line():
    assert "unknown flag --xyzzy (from FLAGS_xyzzy)" in refused("--fromenv=xyzzy", FLAGS_xyzzy="1")
    assert "cannot come from the environment" in refused("--fromenv=fromenv", FLAGS_fromenv="fromenv")


def test_undefok_allows_the_unknown_flags_it_names_wherever_it_stands():
    assert values("--undefok=foo,b-r", "--foo=1", "--nofoo", "--b_r", "--verbose") == {"verbose": True}
    assert read("--foo=1", "--undefok=foo", "program").program == ("program",)
    assert "--baz" in refused("--undefok=foo", "--baz")


def test_the_command_line_beats_the_first_prefix_and_that_the_second():
    every = {"OURS_NODE_RANK": "2", "PET_NODE_RANK": "3"}
    setting = read("--node_rank=1", **every).settings["node_rank"]
    assert (setting.value, setting.precedence, setting.origin) == (1, 0, "--node_rank=1")
    setting = read(**every).settings["node_rank"]
    assert (setting.value, setting.precedence, setting.origin) == (2, 1, "OURS_NODE_RANK=2")
    setting = read(PET_NODE_RANK="3").settings["node_rank"]
    assert (setting.value, setting.precedence, setting.origin) == (3, 2, "PET_NODE_RANK=3")


def test_an_empty_variable_is_unset():
    assert values(OURS_NODE_RANK="", PET_NODE_RANK="3") == {"node_rank": 3}


def test_a_variable_may_use_an_alias_but_no_letter_no_negation_and_no_flag_of_the_grammar():
    assert values(PET_SHUTDOWN_TIMEOUT="3") == {"grace": "3"}
    assert values(PET_SHUTDOWN_TIMEOUT="3", PET_GRACE="4") == {"grace": "4"}
    assert values(PET_G="3", PET_NOVERBOSE="1", OURS_HELP="1", PET_FLAGFILE="x", PET_node_rank="7") == {}


def test_a_bad_variable_is_named_unless_the_command_line_made_it_moot():
    assert refused(OURS_NODE_RANK="x") == "OURS_NODE_RANK=x: expected a whole number"
    assert values("--node_rank=1", OURS_NODE_RANK="x") == {"node_rank": 1}


def test_a_boolean_behind_a_binary_prefix_is_0_or_1():
    assert values(PET_VERBOSE="1") == {"verbose": True}
    assert values(PET_VERBOSE="0") == {"verbose": False}
    assert values(OURS_VERBOSE="yes") == {"verbose": True}
    assert refused(PET_VERBOSE="true") == "PET_VERBOSE=true: expected 0 or 1"


def test_other_variables_are_not_looked_at():
    assert values(OURS_XYZZY="1", NODE_RANK="1", XPET_NODE_RANK="2") == {}


def test_boolean_takes_no_other_word():
    with pytest.raises(ValueError, match="true or false"):
        boolean("2")


@given(st.text(min_size=1), st.lists(st.text(min_size=1), min_size=1))
def test_the_nearest_word_of_those_that_hold_it_is_itself(word, others):
    assert nearest(word, [*others, word]) == word


def test_nothing_is_near_to_nothing():
    assert nearest("word", []) == ""
