"""`ksana trace misses`: the causes in a log, and in a recording."""

import collections
import json
import logging

import numpy as np
import pytest

from ksana_jax.cli import main
from ksana_jax.core.prefix_report import CAUSES, PrefixReport, read_sentence
from ksana_jax.lab import recording
from ksana_jax.lab.trace.misses import misses
from ksana_jax.lab.trace.requests import plain_request
from tests.fakes import asking, make_engine, run


def test_a_log_and_a_recording_give_what_the_requests_say(tmp_path, caplog):
    engine = make_engine(num_blocks=24, caching=True, stored={"prefix_report_blocks": 50})
    rng, requests = np.random.default_rng(1), []
    with caplog.at_level(logging.INFO, "ksana_jax"):
        for _ in range(40):  # prompts that differ in the second block, or later
            prompt = np.repeat([1, 1, 1, *rng.integers(1, 3, 2)], rng.integers(1, 4, 5)).astype(np.int32)
            requests.append(engine.add_request(prompt, asking(2), cache_salt="b" * bool(rng.random() < 0.1)))
            run(engine)
    (log := tmp_path / "serve.log").write_text("12:00 ksana_jax: other\n" + "\n".join(caplog.messages))
    recording.write(made := tmp_path / recording.NAME, {}, map(plain_request, requests))
    reports = [request.output().prefix_report for request in requests]
    found = misses(log)
    assert found == misses(made) == misses(tmp_path)
    causes, computed = collections.Counter(), collections.Counter()
    for report in reports:
        causes[report.cause] += 1
        for group in (report.cause, report.position):
            computed[group] += report.num_tokens - report.num_cached
    rows, positions = found["cause"], found["position"]
    assert {row["of"]: row["requests"] for row in rows} == causes and len(causes) > 3
    assert {row["of"]: row["computed"] for row in rows} == {cause: computed[cause] for cause in causes}
    assert len(positions) > 1
    assert {int(row["of"]): row["computed"] for row in positions}.items() <= computed.items()
    assert sum(row["tokens"] for row in rows) == sum(report.num_tokens for report in reports)
    tokens = [row["computed"] for row in rows]
    assert tokens == sorted(tokens, reverse=True)


def test_the_table_has_both_texts(tmp_path, capsys):
    here, there = "...is 29 Nov\n...", "...is 28 Nov\n..."
    report = PrefixReport("diverged", 1412, 1000, 1000, {"device": 1000}, 1004, here, there)
    assert str(report) == (
        "diverged: reused 1,000 of 1,412 tokens: differs from an earlier prompt at token 1,004: "
        "'...is 29 Nov\\n...' here, '...is 28 Nov\\n...' there"
    )
    (tmp_path / "log").write_text(f"r1: {report}\n" * 3)
    with pytest.raises(SystemExit, match="0"):
        main(["trace", "misses", str(tmp_path / "log"), "--json"])
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["cause", "requests", "tokens", "computed", "last"]
    table = " ".join(" ".join(lines[lines.index(next(line for line in lines if "position" in line)) + 1 :]).split())
    assert table == "1,004 3 4,236 1,236 '...is 29 Nov\\n...' here, '...is 28 Nov\\n...' there"
    assert json.loads(last)["position"][0]["computed"] == 1236


@pytest.mark.parametrize("cause", CAUSES)
def test_every_sentence_is_read(cause):
    report = PrefixReport(cause, 9000, 4000, 5000, {"device": 1000, "host": 3000}, 4003, "a", "b", 2.5, "r7")
    found = read_sentence(f"12:00 ksana_jax: r1: prefix cache: {report}")
    assert found is not None and found[:3] == (cause, 4000, 9000) and found[3]
    assert "of 9,000 tokens (3,000 from host): " in str(report)


def test_a_log_without_reports_is_refused(tmp_path, capsys):
    (tmp_path / "log").write_text("nothing\n")
    with pytest.raises(SystemExit):
        main(["trace", "misses", str(tmp_path / "log")])
    assert "has no reports of the prefix cache: log with `ksana -v serve" in capsys.readouterr().err
