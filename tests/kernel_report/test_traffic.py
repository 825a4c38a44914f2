"""Launches and bytes of programs, counted by hand."""

import re

import pytest

from tests.kernel_report.traffic import Traffic, count_traffic

# Rows of a pool are gathered and scattered, and a row of x is doubled in place in each of 5 turns.
HLO = """
%gathered (param_0.1: f32[800,16], param_1.1: s32[4]) -> f32[4,16] {
  %param_0.1 = f32[800,16]{1,0} parameter(0)
  %param_1.1 = s32[4]{0} parameter(1)
  %bitcast.1 = f32[800,1,16]{2,1,0} bitcast(%param_0.1)
  ROOT %gather.1 = f32[4,16]{1,0} gather(%bitcast.1, %param_1.1), slice_sizes={1,1,16}
}

%doubled (param_0.2: f32[4,16], param_1.2: s32[]) -> f32[4,16] {
  %param_0.2 = f32[4,16]{1,0} parameter(0)
  %param_1.2 = s32[] parameter(1)
  %dynamic-slice.1 = f32[1,16]{1,0} dynamic-slice(%param_0.2, %param_1.2), dynamic_slice_sizes={1,16}
  %add.1 = f32[1,16]{1,0} add(%dynamic-slice.1, %dynamic-slice.1)
  ROOT %dynamic-update-slice.1 = f32[4,16]{1,0} dynamic-update-slice(%param_0.2, %add.1, %param_1.2)
}

%body (arg.1: (s32[], f32[4,16])) -> (s32[], f32[4,16]) {
  %arg.1 = (s32[], f32[4,16]{1,0}) parameter(0)
  %get-tuple-element.1 = s32[] get-tuple-element(%arg.1), index=0
  %get-tuple-element.2 = f32[4,16]{1,0} get-tuple-element(%arg.1), index=1
  %fusion.2 = f32[4,16]{1,0} fusion(%get-tuple-element.2, %get-tuple-element.1), kind=kLoop, calls=%doubled
  ROOT %tuple.1 = (s32[], f32[4,16]{1,0}) tuple(%get-tuple-element.1, %fusion.2)
}

%scattered (param_0.3: f32[800,16], param_1.3: s32[4], param_2.3: f32[4,16]) -> f32[800,16] {
  %param_0.3 = f32[800,16]{1,0} parameter(0)
  %param_1.3 = s32[4]{0} parameter(1)
  %param_2.3 = f32[4,16]{1,0} parameter(2)
  ROOT %scatter.1 = f32[800,16]{1,0} scatter(%param_0.3, %param_1.3, %param_2.3), to_apply=%region
}

ENTRY %main (p.1: f32[800,16], p.2: s32[4]) -> f32[800,16] {
  %p.1 = f32[800,16]{1,0} parameter(0)
  %p.2 = s32[4]{0} parameter(1)
  %constant.1 = s32[] constant(0)
  %fusion.1 = f32[4,16]{1,0} fusion(%p.1, %p.2), kind=kLoop, calls=%gathered
  %tuple.2 = (s32[], f32[4,16]{1,0}) tuple(%constant.1, %fusion.1)
  %while.1 = (s32[], f32[4,16]{1,0}) while(%tuple.2), body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %get-tuple-element.3 = f32[4,16]{1,0} get-tuple-element(%while.1), index=1
  ROOT %fusion.3 = f32[800,16]{1,0} fusion(%p.1, %p.2, %get-tuple-element.3), kind=kInput, calls=%scattered
}
"""
ROWS, ROW, INDICES = 4 * 16 * 4, 16 * 4, 4 * 4


def test_launches_in_a_loop_count_as_often_as_it_turns_and_pools_by_the_rows_that_are_touched():
    read = (ROWS + INDICES) + 5 * (ROW + 4) + (INDICES + ROWS)
    assert count_traffic(HLO) == Traffic(1 + 5 + 1, read, ROWS + 5 * ROW + ROWS)


def test_a_copy_reads_and_writes_all_of_a_pool():
    copied = HLO.replace("fusion(%p.1, %p.2, %get", "fusion(%copy.1, %p.2, %get").replace(
        "  %constant.1 =", "  %copy.1 = f32[800,16]{1,0} copy(%p.1)\n  %constant.1 ="
    )
    before, after, pool = count_traffic(HLO), count_traffic(copied), 800 * 16 * 4
    assert after == (before.launches + 1, before.read_bytes + pool, before.written_bytes + pool)


def test_a_loop_without_a_known_number_of_turns_is_an_error():
    with pytest.raises(ValueError, match=re.escape("while.1 runs an unknown number of times")):
        count_traffic(HLO.replace("known_trip_count", "other"))
