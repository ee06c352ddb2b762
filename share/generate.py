"""Write what is made from the table of flags: the man page and the completions, as they lie where they are installed,
the keywords of the Python API, and the pages of the documentation that list flags and decisions.

python share/generate.py            what `make generated` does
python share/generate.py --check    exit code 1, and the names, if one of them is out of date
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from keywords import keywords, submit_keywords
from reference import command_page, decisions_page
from reference import job_page as job_reference

from infini_run.jobs.options.completion import script as job_script
from infini_run.jobs.options.manpage import man_page as job_page
from infini_run.options.completion import script
from infini_run.options.manpage import man_page

HERE = Path(__file__).parent


def files() -> dict[Path, str]:
    """Every file and what it should hold."""
    version = re.search(r'^version = "(.+)"$', (HERE.parent / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    return {
        HERE / "man/man1/infini-run.1": man_page(version[1]),
        HERE / "bash-completion/completions/infini-run": script("bash"),
        HERE / "zsh/site-functions/_infini-run": script("zsh"),
        HERE / "fish/vendor_completions.d/infini-run.fish": script("fish"),
        HERE / "man/man1/infini-job.1": job_page(version[1]),
        HERE / "bash-completion/completions/infini-job": job_script("bash"),
        HERE / "zsh/site-functions/_infini-job": job_script("zsh"),
        HERE / "fish/vendor_completions.d/infini-job.fish": job_script("fish"),
        HERE.parent / "docs/reference/infini-run.md": command_page(),
        HERE.parent / "docs/reference/infini-job.md": job_reference(),
        HERE.parent / "docs/decisions/README.md": decisions_page(HERE.parent / "docs/decisions"),
        HERE.parent / "infini_run/options/keywords.py": keywords(),
        HERE.parent / "infini_run/jobs/options/keywords.py": submit_keywords(),
    }


def main() -> None:
    stale = {path: text for path, text in files().items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        print(path.relative_to(HERE.parent))
        if "--check" not in sys.argv:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    if "--check" in sys.argv and stale:
        sys.exit("out of date: make generated")


if __name__ == "__main__":
    main()
