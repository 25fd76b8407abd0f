"""What the tests of this folder prove must hold under `python -O` too, where `assert` checks nothing."""

import ast
import re
import subprocess
import sys
from pathlib import Path

from tests.security.conftest import check
from tests.serving import ROOT


def test_no_check_is_an_assert():
    for path in (*(ROOT / "src").rglob("*.py"), *Path(__file__).parent.glob("*.py")):
        check(not any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(path.read_text()))), path)
    for path in (ROOT / "src").rglob("*.py"):
        check("__debug__" not in path.read_text(), path)


def test_all_of_this_holds_under_python_O():
    if sys.flags.optimize:
        return  # this is that run
    # Without `assert` and `__debug__` our own code is the same under -O (see the test before); what libraries check may
    # not be. So the holes found in ours are tried again, each by the number in its name.
    chosen = " or ".join(["finding_", *(f"test_{number}_" for number in range(1, 15))])
    pytest_options = ["-q", "-x", "-p", "no:cacheprovider", "-k", chosen, str(Path(__file__).parent)]
    command = [sys.executable, "-O", "-m", "pytest", *pytest_options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    check(done.returncode == 0, done.stdout[-3000:])
    check(re.search(r"\d{2,} passed", done.stdout) and "failed" not in done.stdout, done.stdout[-500:])
