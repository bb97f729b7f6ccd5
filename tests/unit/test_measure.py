"""measure: SSE by the standard, tokens from usage, and what does not count as a completion."""

import json

import pytest
from handed import cases, hold
from hypothesis import given
from hypothesis import strategies as st
from lockstep_core import measure

CASES = cases("D")


def read(name):
    return measure.stream(CASES[name]["input"]["events"])


def data(delta=None, *, finish=None, usage=None):
    choices = [] if delta is None and finish is None else [{"index": 0, "delta": delta or {}, "finish_reason": finish}]
    return "data: " + json.dumps({"choices": choices, "usage": usage}) + "\n\n"


DONE = "data: [DONE]\n\n"


class TestHanded:
    def test_d01_ordinary_stream(self):
        got = read("D01")
        hold(
            CASES["D01"],
            {field: got[field] for field in CASES["D01"]["expected"] if field != "formula"},
            prose={"formula"},
        )
        assert (got["prompt_tokens"], got["text"], got["content_events"]) == (52, "Hello world!", 3)

    def test_d02_several_tokens_an_event(self):
        got = read("D02")
        mine = {field: got[field] for field in ("ok", "tokens", "ttft_s", "decode_tok_s", "finish_reason")}
        mine["sse_content_events"] = got["content_events"]
        hold(CASES["D02"], mine, prose={"wrong_if_events_counted", "note"})
        by_events = round((got["content_events"] - 1) / (0.44 - 0.30), 2)
        assert by_events == CASES["D02"]["expected"]["wrong_if_events_counted"]
        assert got["decode_tok_s"] != by_events

    def test_d03_reasoning_first(self):
        got = measure.stream(CASES["D03"]["input"]["events"], thinking=False)
        mine = {
            "tokens": got["tokens"],
            "reasoning_tokens": got["reasoning_tokens"],
            "ttft_any_s": got["ttft_any_s"],
            "ttft_content_s": got["ttft_s"],
            "decode_tok_s": got["decode_tok_s"],
            "thinking_off_bench": f"flag: {got['flags'][0]}",
        }
        hold(CASES["D03"], mine, prose={"decode_window", "content_only_window_value_to_refuse"})
        refused = CASES["D03"]["expected"]["content_only_window_value_to_refuse"]
        assert round((got["tokens"] - 1) / (1.24 - 1.20), 1) == refused
        assert got["decode_tok_s"] != refused
        assert measure.stream(CASES["D03"]["input"]["events"], thinking=True)["flags"] == []

    def test_d04_keepalives(self):
        got = read("D04")
        hold(CASES["D04"], {field: got[field] for field in CASES["D04"]["expected"]})

    def test_d05_finish_reasons(self):
        cases, expected = CASES["D05"]["input"], CASES["D05"]["expected"]
        judged = {
            name: measure.completion(case["usage"], case["finish_reason"], max_tokens=case["max_tokens"])
            for name, case in cases.items()
        }
        assert {field: judged["a"][field] for field in expected["a"]} == expected["a"]
        assert {field: judged["b"][field] for field in ("ok", "complete_budget")} == {
            "ok": True,
            "complete_budget": False,
        }
        assert set(expected["b"]) == {"ok", "complete_budget", "note"}
        assert judged["b"]["note"] == "317 of 512 tokens: do not mix with full ones"
        assert {field: judged["c"][field] for field in expected["c"]} == expected["c"]

    def test_every_case_is_here(self):
        assert {name[5:8].upper() for name in dir(TestHanded) if name.startswith("test_d")} == set(CASES)


class TestSse:
    def test_line_ends_and_multi_line_data(self):
        decoder = measure.SseDecoder()
        assert decoder.feed("data: a\r\ndata: b\r\n\r\ndata:c\rdata:  d\r\rdata: e\n\n") == ["a\nb", "c\n d", "e"]

    def test_byte_order_mark_fields_without_colon_and_other_fields(self):
        decoder = measure.SseDecoder()
        assert decoder.feed("\ufeffdata: a\nid: 7\nretry: 10\nevent: x\n\n") == ["a"]
        assert decoder.feed("data\n\n") == [""]
        assert decoder.feed("event: ping\n\n") == []
        assert decoder.comments == 0

    def test_an_unfinished_event_is_none(self):
        decoder = measure.SseDecoder()
        assert decoder.feed("data: a\n") == []
        assert decoder.feed("\n") == ["a"]

    @given(st.lists(st.integers(1, 7), max_size=60))
    def test_cut_anywhere_even_inside_a_character(self, cuts):
        raw = ': ping\r\n\r\ndata: {"a": "Grüße, 世界 🚀"}\r\n\r\n:\ndata: x\ndata: y\n\ndata: [DONE]\n\n'.encode()
        decoder, events, at = measure.SseDecoder(), [], 0
        for width in [*cuts, len(raw)]:
            events += decoder.feed(raw[at : at + width])
            at += width
        assert events == ['{"a": "Grüße, 世界 🚀"}', "x\ny", "[DONE]"]
        assert decoder.comments == 2

    def test_broken_utf8_does_not_stall(self):
        assert measure.SseDecoder().feed(b"data: a\xffb\n\n") == ["a\ufffdb"]


class TestNotACompletion:
    @pytest.mark.parametrize(
        ("chunks", "why"),
        [
            ([data({"content": "Hi"}), data(finish="abort"), data(usage={"completion_tokens": 40}), DONE], "abort"),
            ([data({"content": "Hi"}), data(finish="stop"), DONE], "no usage"),
            ([data({"content": "Hi"}, finish="stop", usage={"completion_tokens": 1})], "cut"),
            ([data({"content": "Hi"}, usage={"completion_tokens": 1}), DONE], "without a finish_reason"),
            ([data({"content": "Hi"}), 'data: {"error": {"message": "out of memory"}}\n\n', DONE], "out of memory"),
            ([data({"content": "Hi"}), "data: {nonsense\n\n", DONE], "no JSON"),
            (['data: {"object": "error", "message": "too long"}\n\n', DONE], "too long"),
            (["data: 7\n\n", DONE], "error"),
            ([data(finish="stop", usage={"completion_tokens": 0}), DONE], "no token"),
            ([], "without a finish_reason"),
        ],
    )
    def test_is_said(self, chunks, why):
        got = measure.stream((0.1 * n, chunk) for n, chunk in enumerate(chunks))
        assert not got["ok"]
        assert why in got["reason"]

    @pytest.mark.parametrize(
        "event",
        [
            '{"choices": 3}',
            '{"choices": [3]}',
            '{"choices": [{"delta": 3}]}',
            '{"choices": [{"delta": {"content": [1]}}]}',
            '{"usage": 3}',
            '{"usage": {"completion_tokens": "7"}, "choices": [{"finish_reason": "stop"}]}',
        ],
    )
    def test_an_event_of_another_shape_is_said(self, event):
        got = measure.stream([(0.1, f"data: {event}\n\n"), (0.2, DONE)])
        assert not got["ok"]
        assert "unknown shape" in got["reason"]

    def test_json_that_nests_without_end_is_no_json(self):
        assert "no JSON" in measure.stream([(0.1, f"data: {'[' * 100_000}\n\n")])["reason"]

    def test_details_of_another_shape_are_unknown(self):
        usage = {"completion_tokens": 1, "completion_tokens_details": 3, "prompt_tokens_details": [1]}
        got = measure.stream([(0.1, data({"content": "a"}, finish="stop", usage=usage)), (0.2, DONE)])
        assert (got["ok"], got["reasoning_tokens"], got["cached_tokens"]) == (True, None, None)

    def test_one_token_has_no_rate(self):
        got = measure.stream(
            [(0.1, data({"content": "Hi"}, finish="length", usage={"completion_tokens": 1})), (0.2, DONE)]
        )
        assert got["ok"]
        assert got["decode_tok_s"] is None

    def test_usage_on_every_chunk_the_last_counts(self):
        chunks = [
            data({"content": "a"}, usage={"completion_tokens": 1}),
            data({"content": "b"}, usage={"completion_tokens": 6}),
        ]
        got = measure.stream(
            [*((0.5 * n, chunk) for n, chunk in enumerate(chunks)), (1.0, data(finish="stop")), (1.0, DONE)]
        )
        assert (got["tokens"], got["decode_tok_s"]) == (6, 10.0)

    def test_openai_names_of_reasoning(self):
        usage = {"completion_tokens": 5, "completion_tokens_details": {"reasoning_tokens": 4}}
        got = measure.stream(
            [(0.1, data({"reasoning": "hm"})), (0.2, data({"content": "x"}, finish="stop", usage=usage)), (0.2, DONE)]
        )
        assert (got["reasoning_tokens"], got["ttft_any_s"], got["ttft_s"], got["reasoning_text"]) == (4, 0.1, 0.2, "hm")
