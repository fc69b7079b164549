"""Faults of processes and networks under a steady load: no wrong token, no lost page, no restart.

`make test` has each fault once, spread over the set-ups; `make faults` has each 20 times with the
tiny model and 3 times with SmolLM2. The table of all that was undergone is printed at the end.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fault_cluster import FAULTS, SET_UPS, Cluster, cluster
from tests.support.fault_judge import HEAD, Row, undergo
from tests.support.hosts import needs_namespaces
from tests.support.model import smollm2_dir
from tests.support.prompts import random_prompt
from tests.support.reference import Case, load_reference

ROUNDS = int(os.environ.get("PDNODE_FAULTS", "1"))  # of each fault, with the tiny model
SMOL_ROUNDS = int(os.environ.get("PDNODE_FAULTS_SMOLLM2", "0"))
# Long prompts with short answers, and short ones with long answers: (prompt, answer) tokens.
TINY_POOL, SMOL_POOL = "4MiB", "96MiB"  # 4,096 and some 2,200 tokens
SHAPES = ((600, 8), (40, 300), (350, 20), (150, 200), (17, 120), (800, 4))

pytestmark = [needs_namespaces, pytest.mark.timeout(3600 * max(1, ROUNDS, SMOL_ROUNDS))]


@pytest.fixture(scope="module")
def table() -> Iterator[list[Row]]:
    rows: list[Row] = []
    yield rows
    sys.stdout.write("\n".join(["", HEAD, *map(str, rows), ""]))


async def go_through(found: Cluster, names: list[str], table: list[Row]) -> None:
    """Each of the faults in turn; its row is shown at once, since all of them take hours."""
    for name in names:
        table.append(await undergo(found, FAULTS[name]))
        sys.stdout.write(f"{table[-1]}\n")
        sys.stdout.flush()


def faults_of(set_up: str, rounds: int) -> list[str]:
    """Round by round every fault goes to the next set-up; in one round each is had once."""
    place = list(SET_UPS).index(set_up)
    return [
        name
        for turn in range(rounds)
        for number, name in enumerate(FAULTS)
        if (number + turn) % len(SET_UPS) == place
    ]


async def known_cases(found: Cluster) -> list[Case]:
    """What each prompt is followed by, as the cluster says at rest; all nodes must say the same."""
    cases = []
    for seed, (prompt_tokens, tokens) in enumerate(SHAPES):
        prompt = random_prompt(prompt_tokens, seed=seed)
        first, second = [await client.tokens(prompt, tokens) for client in found.decodes]
        assert first == second
        cases.append(Case(prompt, first))
    return cases


@pytest.mark.parametrize("set_up", SET_UPS)
async def test_faults_under_load(
    set_up: str, tiny_model: Path, tmp_path: Path, table: list[Row]
) -> None:
    async with cluster(SET_UPS[set_up], tiny_model, tmp_path, pool_bytes=TINY_POOL) as found:
        found.cases = await known_cases(found)
        await go_through(found, faults_of(set_up, ROUNDS), table)


@pytest.mark.skipif(not SMOL_ROUNDS, reason="long; see `make faults`")
@pytest.mark.parametrize("set_up", SET_UPS)
async def test_faults_under_load_with_smollm2(
    set_up: str, tmp_path: Path, table: list[Row]
) -> None:
    async with cluster(SET_UPS[set_up], smollm2_dir(), tmp_path, pool_bytes=SMOL_POOL) as found:
        found.cases = load_reference().prompts[:12]
        await go_through(found, faults_of(set_up, SMOL_ROUNDS), table)
