"""The prefix tree counts what prompts have in common, as counting one by one does, and stays small and cheap."""

import random

import pytest

from quire.core.live.prefixes import MAX_NODES, SLACK_NODES, Node, PrefixTree
from quire.kv.prefix import HashChain, root_hash
from tests.core.harness import Core

BLOCK = 4


def hashes_of(tokens: list[int]) -> list[bytes]:
    return HashChain(root_hash(""), BLOCK).upto(tokens, len(tokens) // BLOCK)


def paths(tree: PrefixTree) -> dict[bytes, Node]:
    """Each node by the hash of its last block, which stands for all before it."""
    found: dict[bytes, Node] = {}

    def visit(node: Node) -> None:
        for first, child in node.children.items():
            assert first == child.hashes[0] and child.parent is node and tree.nodes[child.number] is child
            assert len(node.children) != 1 or child.requests < node.requests or node is tree.root or node.hits
            found[child.hashes[-1]] = child
            visit(child)

    visit(tree.root)
    assert len(found) == len(tree.nodes)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_nodes_have_the_requests_and_hits_of_all_prompts_that_begin_so(seed):
    rng = random.Random(seed)
    tree = PrefixTree(Core().engine.kv)
    prompts, hits = [], []
    for _ in range(60):
        beginning = rng.choice(prompts)[: rng.randrange(20)] if prompts else []
        tokens = beginning + [rng.randrange(2) for _ in range(rng.randrange(BLOCK, 20))]
        hashes = hashes_of(tokens)
        known = {known_hash for other in prompts for known_hash in hashes_of(other)}
        num_hit = sum(content_hash in known for content_hash in hashes)
        num_hit -= num_hit == len(hashes)  # a hit never covers the last token
        prompts.append(tokens)
        hits.append(num_hit)
        tree.insert(hashes, len(hashes), num_hit)
    for end_hash, node in paths(tree).items():
        assert node.requests == sum(end_hash in hashes_of(tokens) for tokens in prompts)
        assert 0 <= node.hits <= node.requests and node.hit_blocks <= node.hits * len(node.hashes)
    assert sum(node.hit_blocks for node in tree.nodes.values()) == sum(hits)
    shown_requests = sum(node.requests for node in tree.root.children.values())
    assert shown_requests == len(prompts)


def test_a_tree_that_is_full_drops_leaves_not_used_for_longest():
    tree = PrefixTree(Core().engine.kv)
    shared = [7] * (8 * BLOCK)
    for idx in range(400):
        tokens = shared + [idx] * BLOCK + [1]
        hashes = hashes_of(tokens)
        tree.insert(hashes, len(hashes), 8 if idx else 0)
        assert len(tree.nodes) <= MAX_NODES + SLACK_NODES
    rows = tree._rows()
    assert len(rows) == len(tree.nodes) == MAX_NODES
    top, *others = rows
    assert top[3:5] == (400, 399) and {row[1] for row in others} == {top[0]}
    kept = paths(tree)
    for idx in range(400 - (MAX_NODES - 1), 400):
        assert hashes_of(shared + [idx] * BLOCK)[-1] in kept
