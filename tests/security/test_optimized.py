"""What the tests of this folder prove must hold under `python -O` too, where `assert` checks nothing.

So `make test` runs this folder with `-O`: what libraries check may not be the same then. Our own code is.
"""

import ast
from pathlib import Path

from tests.security.conftest import check
from tests.serving import ROOT


def test_no_check_is_an_assert():
    for path in (*(ROOT / "src").rglob("*.py"), *Path(__file__).parent.glob("*.py")):
        check(not any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(path.read_text()))), path)
    for path in (ROOT / "src").rglob("*.py"):
        check("__debug__" not in path.read_text(), path)
