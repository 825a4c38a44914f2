"""Machine code that touches registers of products that still run is found, in listings and in what ptxas makes."""

import pytest

from pallas_kernels import aot
from tests.kernel_report import report, sass
from tests.kernel_report.running import find_touches

needs_compiler = pytest.mark.skipif(
    aot.find_ptxas() is None or sass.find_nvdisasm() is None, reason="ptxas or nvdisasm is not installed"
)

# Four accumulators, R24 to R27, and four registers of the left operand, R20 to R23.
PRODUCT = "HGMMA.64x8x16.F32.BF16 R24, R20, gdesc[UR4], R24, gsb0 | vvvvxxxx"
OTHER = "HGMMA.64x8x16.F32.BF16 R28, R20, gdesc[UR4], R28, gsb0 | vvvv    xxxx"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x{} |"
READS_SUM = "FADD R2, R24, R24 |     v"
WRITES_OPERAND = "MOV R20, R2 | ^"
READS_OPERAND = "MOV R2, R20 | v"


def touches(*lines: str) -> list[str]:
    """Finds touches in a kernel. Each line is a label, or an instruction and the marks of registers from R20 on."""
    text, address = ["        // |     # 0123456789 |", ".text.kernel:           // |"], 0
    for line in lines:
        if line.startswith(".L"):
            text.append(f"{line}     // +....")
            continue
        code, _, marks = line.partition("|")
        text.append(f"        /*{address:04x}*/    {code.strip()} ;    /* 0x0000000000000000 */    // |")
        marks = 20 * " " + marks[1:]
        text.append(f"{'/* 0x0000000000000000 */':>120}    // |  12   {marks:<40}|")
        address += 16
    return [str(touch) for touch in find_touches(sass.parse("\n".join(text))["kernel"])]


# As in nvdisasm's output of a kernel, without uses of registers.
REAL = """
.text.hopper_attention:
        /*1f90*/              @!P1 BRA `(.L_x_6) ;                                        /* 0x0000000400fc9947 */
                                                                                          /* 0x028fd60003800000 */
        /*1eb0*/                   LDG.E R58, desc[UR4][R58.64] ;                         /* 0x000000043a3a7981 */
                                                                                          /* 0x000ea2000c1e1900 */
.L_x_6:
        /*8750*/                   EXIT ;                                                 /* 0x000000000000794d */
                                                                                          /* 0x000fea0003800000 */
"""


def test_instructions_are_read_with_their_predicates_and_labels():
    function = sass.parse(REAL)["hopper_attention"]
    [branch, load, end] = function.code
    assert (branch.predicate, branch.target, branch.ends) == ("@!P1", "L_x_6", False)
    assert (load.address, load.opcode, load.name) == (0x1EB0, "LDG.E", "LDG") and end.ends
    assert function.labels == {"L_x_6": 2}
    with pytest.raises(ValueError, match="half of an encoding is missing after '/\\*8750"):
        sass.parse(REAL[: REAL.rindex("/* 0x000fea")])


def test_a_product_that_was_waited_for_gives_its_registers_back():
    assert touches(PRODUCT, WAIT.format(0), READS_SUM, WRITES_OPERAND, "EXIT |") == []


@pytest.mark.parametrize("instruction, register", [(READS_SUM, "R24"), (WRITES_OPERAND, "R20")])
def test_a_touch_before_the_wait_is_found_and_says_where(instruction, register):
    opcode = instruction.split()[0]
    assert touches(PRODUCT, instruction, WAIT.format(0), "EXIT |") == [
        f"{opcode} at 0x10 touches {register} of HGMMA.64x8x16.F32.BF16 at 0x0"
    ]


def test_operands_may_be_read_and_sums_be_added_to_by_the_next_product():
    assert touches(PRODUCT, READS_OPERAND, PRODUCT, OTHER, WAIT.format(0), "EXIT |") == []


def test_a_product_with_other_sums_is_no_reason_to_overwrite_operands_or_to_read_sums():
    overwrites = "HGMMA.64x8x16.F32.BF16 R20, gdesc[UR4], RZ, !UPT, gsb0 | ^^^^"
    reads = "HGMMA.64x8x16.F32.BF16 R28, R24, gdesc[UR4], R28, gsb0 |     vvvvxxxx"
    for product in (overwrites, reads):
        assert len(touches(PRODUCT, product, WAIT.format(0), "EXIT |")) == 1


def test_a_wait_for_all_but_the_newest_group_leaves_that_one_running():
    newest = "FADD R2, R28, R28 |         v"
    assert touches(PRODUCT, OTHER, WAIT.format(1), READS_SUM, WAIT.format(0), newest, "EXIT |") == []
    assert len(touches(PRODUCT, OTHER, WAIT.format(1), newest, "EXIT |")) == 1
    assert len(touches(PRODUCT, OTHER, WAIT.format(2), READS_SUM, "EXIT |")) == 1


def test_products_without_a_group_belong_to_the_next_one():
    open_one = PRODUCT.replace(", gsb0", "")
    assert touches(open_one, OTHER, WAIT.format(0), READS_SUM, "EXIT |") == []
    assert len(touches(open_one, WAIT.format(0), READS_SUM, "EXIT |")) == 1


def test_what_runs_on_into_the_next_turn_of_a_loop_or_past_a_branch_is_followed():
    turn = (".L_x_1:", READS_SUM, PRODUCT, "@P0 BRA `(.L_x_1) |", WAIT.format(0), "EXIT |")
    assert len(touches(*turn)) == 1
    skipped = (PRODUCT, "@P0 BRA `(.L_x_1) |", WAIT.format(0), ".L_x_1:", READS_SUM, "EXIT |")
    assert len(touches(*skipped)) == 1
    assert touches(PRODUCT, "@P0 BRA `(.L_x_1) |", WRITES_OPERAND, ".L_x_1:", WAIT.format(0), "EXIT |") != []
    waited = (PRODUCT, WAIT.format(0), "@P0 BRA `(.L_x_1) |", WRITES_OPERAND, ".L_x_1:", READS_SUM, "EXIT |")
    assert touches(*waited) == []


def test_a_call_while_a_product_runs_is_not_followed_and_said():
    assert touches(PRODUCT, "CALL.REL.NOINC `(.L_x_1) |", WAIT.format(0), "EXIT |") == [
        "CALL.REL.NOINC at 0x10 leaves, which is not followed, during HGMMA.64x8x16.F32.BF16 at 0x0"
    ]


PTX = """
.version 8.4
.target sm_90a
.address_size 64
.visible .entry product(.param .u64 out) .maxntid 128, 1, 1
{
  .reg .pred p; .reg .b32 %r<4>; .reg .f32 %f<4>; .reg .b64 %rd<4>;
  ld.param.u64 %rd0, [out]; mov.u32 %r0, %tid.x; mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.x; mov.u32 %r3, %tid.x;
  mov.b64 %rd1, 4611686293338849280; setp.ne.b32 p, %r0, 500;
  mov.f32 %f0, 0f00000000; mov.f32 %f1, 0f00000000; mov.f32 %f2, 0f00000000; mov.f32 %f3, 0f00000000;
  wgmma.fence.sync.aligned;
  wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, {%r0, %r1, %r2, %r3}, %rd1, p, 1, 1, 0;
  wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
  st.global.v4.f32 [%rd0], {%f0, %f1, %f2, %f3};
  ret;
}
"""
LAUNCH = """
 %1 = gpu.launch async [%0] blocks(%a, %b, %c) in (%d = %c1, %e = %c1, %f = %c1) threads(%g, %h, %i) in \
(%j = %c128, %k = %c1, %l = %c1) dynamic_shared_memory_size %c1024_i32 {
"""


def read(folder, nvdisasm: str) -> report.Kernel:
    ptxas = aot.find_ptxas()
    assert ptxas is not None
    (folder / "product_0.ptx").write_text(PTX)
    (folder / "product_0.mlir-passes.log").write_text(LAUNCH)
    compiling = "ptxas info    : Compiling entry function 'product' for 'sm_90a'\nptxas info    : Used 24 registers"
    (folder / "product_0.ptxas").write_text(compiling)
    [kernel] = report.read_kernels(folder, 'kernel_hash = "1"', "sm_90a", ptxas, nvdisasm)
    return kernel


@needs_compiler
def test_a_kernel_as_compiled_passes_and_fails_where_its_waits_are_taken_from_its_machine_code(tmp_path):
    nvdisasm = sass.find_nvdisasm()
    assert nvdisasm is not None
    assert report.judge_kernel(read(tmp_path, nvdisasm), 232_448) == []
    planted = tmp_path / "without_waits"
    without = "s/DEPBAR.LE gsb0, 0x0/DEPBAR.LE gsb0, 0x7/"
    planted.write_text(f'#!/bin/sh\n"{nvdisasm}" "$@" | sed "{without}"\n')
    planted.chmod(0o755)
    [said] = report.judge_kernel(read(tmp_path, str(planted)), 232_448)
    assert "registers of running wgmmas are touched, " in said and " of HGMMA.64x8x16.F32.BF16 at 0x" in said
