"""Score `closeranks diagnose` on a file of cases: `python bench/score_hangs.py tests/corpus/hangs.jsonl`.

The product is given the names and texts of a case's evidence and nothing else. A case counts as right when the main
finding's class is the truth's; as forbidden when a known issue is matched that `must_not_match` names; as overclaimed
when the main finding is `shown` although `may_be_certain` is false. Prints one line per miss, a table, and as its last
line JSON: {"cases": n, "class_right": n, "forbidden": n, "overclaimed": n}.
"""

import argparse
import json
import re
import sys
import time
from collections import Counter
from pathlib import Path

from closeranks.diagnose.judge import diagnose_texts


def main() -> int:
    """Score one file; exit 0 always, 2 on a file that holds no cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("-v", "--verbose", action="store_true", help="print every case")
    args = parser.parse_args()
    total: Counter[str] = Counter()
    certain = 0
    began = time.perf_counter()
    with args.file.open(encoding="utf-8") as lines:
        for line in lines:
            if not line.strip():
                continue
            case = json.loads(line)
            truth = case["truth"]
            verdict = diagnose_texts([(e["name"], e["text"]) for e in case["evidence"]])
            main_finding = verdict.main
            ids = [k.id for f in verdict.findings for k in f.known_issues]
            right = main_finding.cls == truth["verdict_class"]
            shown = main_finding.certainty == "shown"
            forbidden = [
                i for i in ids if any(n == m for n in re.findall(r"\d+", i) for m in truth.get("must_not_match") or [])
            ]
            over = shown and not truth.get("may_be_certain", True)
            total.update(cases=1, class_right=right, forbidden=bool(forbidden), overclaimed=over)
            certain += shown
            if args.verbose or not right or forbidden or over:
                flags = "".join(
                    (" " if right else " WRONG", " FORBIDDEN" if forbidden else "", " OVERCLAIMED" if over else "")
                )
                got = f"{main_finding.cls} ({main_finding.certainty}, {main_finding.rule})"
                print(f"{case['id']}: {got}, truth {truth['verdict_class']}{flags} {ids}")
    if not total["cases"]:
        print(f"{args.file}: no cases", file=sys.stderr)
        return 2
    print(f"{total['cases']} cases in {time.perf_counter() - began:.1f} s, {certain} main findings shown")
    print(json.dumps({k: total[k] for k in ("cases", "class_right", "forbidden", "overclaimed")}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
