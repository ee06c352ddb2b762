"""The report quotes what real programs say of their end, in the languages that this machine has."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

BEFORE = 30  # lines that a program prints before it fails

PYTHON = f"""
import sys, queue
for n in range({BEFORE}): print('step', n, file=sys.stderr)
class Late:
    def __del__(self): raise TypeError('in del')
def f(n):
    if n == 0: HOW
    f(n - 1)
late = Late()
f(3)
"""
C = f"""
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef __cplusplus
#include <stdexcept>
#endif
int main(int argc, char **argv) {{
    (void)argv;
    for (int n = 0; n < {BEFORE}; n++) fprintf(stderr, "step %d\\n", n);
    HOW;
    return argc;
}}
"""
NODE = f"""
for (let n = 0; n < {BEFORE}; n++) console.error('step', n);
function f(n) {{ if (n === 0) HOW; f(n - 1); }}
f(20);
"""
RUST = f"""
fn f(n: usize) -> usize {{ if n == 0 {{ let v: Vec<usize> = vec![]; return v[3]; }} f(n - 1) + 1 }}
fn main() {{ for n in 0..{BEFORE} {{ eprintln!("step {{n}}"); }} std::process::exit(f(20) as i32); }}
"""
JAVA = f"""
public class Main {{
    static int f(int n) {{
        if (n == 0) throw new IllegalStateException("boom", new RuntimeException("why"));
        return f(n - 1) + 1;
    }}
    public static void main(String[] a) {{
        for (int n = 0; n < {BEFORE}; n++) System.err.println("step " + n);
        f(20);
    }}
}}
"""


def built(compiler, source, *flags):
    """The program of a source file, or a skip where there is no such compiler."""
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    program = source.with_name("program")
    done = subprocess.run([compiler, *flags, source, "-o", program], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{compiler}: {done.stderr[-200:]}")
    return [str(program)]


def interpreted(name, *words):
    if shutil.which(name) is None:
        pytest.skip(f"there is no {name}")
    return [name, *map(str, words)]


def program(language, how, folder):
    if language == "python":
        (folder / "a.py").write_text(PYTHON.replace("HOW", how))
        return [sys.executable, str(folder / "a.py")]
    if language == "node":
        (folder / "a.js").write_text(NODE.replace("HOW", how))
        return interpreted("node", "--max-old-space-size=20", folder / "a.js")
    if language == "java":
        (folder / "Main.java").write_text(JAVA)
        return interpreted("java", folder / "Main.java")
    if language == "rust":
        (folder / "a.rs").write_text(RUST)
        return built("rustc", folder / "a.rs", "-A", "warnings")
    (folder / f"a.{language}").write_text(C.replace("HOW", how))
    return built("gcc" if language == "c" else "g++", folder / f"a.{language}", "-w", "-O0", "-fstack-protector-all")


@pytest.mark.parametrize(
    ("language", "how", "message"),
    [
        ("python", "raise ValueError('boom')", "ValueError: boom"),
        ("python", "raise queue.Empty('nothing came')", "_queue.Empty: nothing came"),
        ("python", "import faulthandler; faulthandler.enable(); faulthandler._sigsegv()", "Segmentation fault"),
        ("c", "assert(argc > 9)", "Assertion `argc > 9' failed."),
        ("c", "char *p = malloc(8); free(p); free(p)", "double free"),
        ("c", "char b[4]; memset(b, 1, argc * 64); if (b[3]) return 0", "*** stack smashing detected ***"),
        ("cc", 'throw std::runtime_error("boom")', "what():  boom"),
        ("cc", "throw 3", "terminate called after throwing an instance of 'int'"),
        ("node", "throw new TypeError('boom')", "TypeError: boom"),
        ("node", "require('./nosuch')", "Error: Cannot find module './nosuch'"),
        ("node", "for (const a = []; ; ) a.push(new Array(1e5).fill(Math.random()))", "FATAL ERROR: "),
        ("rust", "", "index out of bounds: the len is 0 but the index is 3"),
        ("java", "", "Caused by: java.lang.RuntimeException: why"),
    ],
)
def test_report_quotes_message_of_program(infini_run, tmp_path, monkeypatch, language, how, message):
    monkeypatch.setenv("RUST_BACKTRACE", "1")
    command = infini_run("--console=none", *program(language, how, tmp_path), cwd=tmp_path)
    assert command.wait() != 0
    quoted = [line[4:] for line in command.err.decode().splitlines() if line.startswith("  | ")]
    assert any(message in line for line in quoted), command.err.decode()
    assert len(quoted) <= 5
