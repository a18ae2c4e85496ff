"""The tree of a log as the JSON of the authors' public code."""

import json

from typer.testing import CliRunner

from gambit import events as ev
from gambit.cli.app import app
from gambit.results.record import authors_tree
from gambit.tree import TraceState
from support.scripted import ScriptedEngine
from support.searching import make_settings, run_one

NODE = {
    "req_id", "parent_id", "branch_depth", "created_at_step", "branch_parent_output_len", "score_history",
    "latest_score", "avg_score", "is_active", "is_completed", "is_pruned", "children", "output_token_count",
    "output_token_ids", "finish_reason", "stop_reason", "final_score",
}  # fmt: skip


def test_a_tree_has_their_fields_and_what_the_search_did(tmp_path):
    watched = run_one(ScriptedEngine(seed=3), make_settings("gambit-authors", capacity=8))
    with ev.LogWriter(tmp_path / "events.jsonl") as log:
        for event in watched.events:
            log.write(event)
    result = CliRunner().invoke(app, ["replay", str(tmp_path / "events.jsonl"), "--as", "gambit-tree"])
    assert result.exit_code == 0, result.output
    exported = json.loads(result.stdout)
    assert exported == authors_tree(tmp_path / "events.jsonl")
    assert list(exported) == ["stats", "nodes", "roots", "completed_traces"]
    tree, stats, nodes = watched.search.record.tree, exported["stats"], exported["nodes"]
    assert stats["total_nodes"] == len(tree.traces) == len(nodes)
    assert stats["completed_count"] == tree.count(TraceState.FINISHED) > 0
    assert stats["branch_counter"] == len(nodes) - len(exported["roots"]) > 0
    for trace in tree.traces:
        node = nodes[str(trace.id)]
        assert node.keys() == NODE
        assert node["output_token_ids"] == list(tree.tokens_of(trace.id))
        assert node["final_score"] == tree.score_of(trace) and node["is_completed"] == (trace.answer is not None)
        if node["parent_id"] is None:
            assert node["req_id"] in exported["roots"] and len(node["score_history"]) == trace.score.count
        else:
            assert node["req_id"] in nodes[node["parent_id"]]["children"]
            assert node["branch_parent_output_len"] == trace.inherited <= node["output_token_count"]
        if node["score_history"]:
            assert node["latest_score"] == node["final_score"]
