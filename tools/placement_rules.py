"""Writes the table of refusals in docs/placement.md: rule, what is printed, the test that breaks it.

python tools/placement_rules.py           writes the table
python tools/placement_rules.py --check   exit 1 when the page is not what classes and tests say

Rules come from `relax_slurm.core.placement_errors`; the sentences are those that the run files of
tests/unit/core/test_placement_errors.py get, so that none of them is made up.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "placement.md"
BEGIN = "<!-- Written by `python tools/placement_rules.py`. -->\n"
END = "<!-- End of the written part. -->\n"


def table() -> str:
    """One row per sentence, in the order of the classes."""
    sys.path.insert(0, str(ROOT))
    from relax_slurm.core.placement_errors import ALL
    from tests.unit.core.test_placement_errors import named_cases, refused

    cases = named_cases()
    lines = ["| rule | code | for instance | test |", "|---|---|---|---|"]
    for refusal in ALL:
        rule, code = refusal.rule, f"`{refusal.code}`"
        for name, (kind, data, _) in cases.items():
            if kind is refusal:
                sentence = refused(data).message.replace("|", "\\|")
                lines.append(f"| {rule} | {code} | {sentence} | `test_rule[{name}]` |")
                rule = code = ""
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write, or compare with `--check`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    wanted = before + BEGIN + "\n" + table() + "\n" + END + after
    if arguments.check:
        return 0 if text == wanted else 1
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
