"""Every bench stands in the list of short runs; the picture of `top` in the docs can be taken."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from proxy.services import Engine, document, serving

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "bench"
sys.path.insert(0, str(BENCH))

import claims  # noqa: E402
import smoke  # noqa: E402

#: Scripts that others start, or that have no arguments and take long or need vLLM.
NOT_RUN = {
    "smoke.py", "check_types.py", "check_words.py", "fit_errors.py", "ranking.py", "search_fleets.py",
    "faults/attacks.py", "faults/reference.py", "faults/watched.py",
    "head_to_head/relay.py",
    "proxies/client.py", "proxies/cpu.py", "proxies/mock_engine.py", "proxies/pick_envoy.py",
    "proxies/relay_aiohttp.py",
}  # fmt: skip


def test_every_bench_has_a_short_run() -> None:
    scripts = {str(path.relative_to(BENCH)) for path in BENCH.rglob("*.py") if "__main__" in path.read_text()}
    assert scripts - NOT_RUN == smoke.RUNS.keys()


def test_the_page_of_claims_is_as_its_results_are() -> None:
    assert claims.PAGE.read_text() == claims.page(), "run `python bench/claims.py`"


@pytest.mark.parametrize(
    "claim", [each for _, of in claims.PAPERS for each in of], ids=lambda each: each.claim[:40]
)
def test_every_claim_names_a_command_that_is_there(claim: claims.Claim) -> None:
    script, _, rest = claim.command.partition(" ")
    if script == "-":
        assert claim.here == "not run"
        return
    source = "".join(path.read_text() for path in (BENCH / script).parent.glob("*.py"))
    parts = rest.split("--only ")[-1].split(" (")[0].split(",")
    if "no longer there" not in rest:
        assert all(part in source for part in parts)


async def test_the_picture_of_top_can_be_taken(tmp_path: Path) -> None:
    pictures = pytest.importorskip("proxy.dashboard.pictures", reason="playwright is not installed")
    async with Engine() as one, serving(tmp_path, document(one)) as running:
        host, port = running.service.admin.address
        await asyncio.to_thread(pictures.terminal, f"http://{host}:{port}", tmp_path / "top.svg")
    assert "hetlb&#160;top" in (tmp_path / "top.svg").read_text()
