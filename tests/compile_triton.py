"""Compile the Triton kernels for absent GPUs; what ptxas says of registers and spills, a line each."""
import re
import subprocess
import tempfile
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gruckpt.engine import triton as page

D, CAPABILITIES = 2048, (80, 86, 90, 100)
PTXAS = Path(triton.__file__).parent/'backends/nvidia/bin'
NUMBERS = {**dict.fromkeys('DRI', 'i32'), **dict.fromkeys(('eps', 's0', 's1', 's2'), 'fp32'), 'seed': 'i64'}
WIDEST = [(page._gru_out, dict(SLOTS=4, NORM=True, NEW=True)), (page._gru_factors, dict(SLOTS=4, NORM=True)),
          (page._gru_back, dict(SLOTS=4, NORM=True, HAS=True)), (page._lstm_out, dict(NEW=True)),
          (page._lstm_factors, {}), (page._mask, {})]
OTHERS = [(page._gru_reset, {}), (page._gru_reset_back, {}), (page._lstm_back, dict(HAS=True))]    # on one


def compiled(kernel, dtype, capability, constants):
    "What ptxas says of a kernel's PTX"
    kinds = {n: 'constexpr' if n in constants else NUMBERS.get(n, f'*{dtype}' if n.isupper() else 'i32')
             for n in kernel.arg_names}
    made = triton.compile(ASTSource(fn=kernel, signature=kinds, constexprs=constants),
                          target=GPUTarget('cuda', capability, 32),
                          options={'num_warps': max(1, min(8, constants['BLOCK'] // 256))})
    newer = PTXAS/'ptxas-blackwell'           # knows the PTX that this Triton writes, and older GPUs too
    ptxas = newer if newer.exists() else PTXAS/'ptxas'
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder)/'kernel.ptx').write_text(made.asm['ptx'])
        arch = re.search(r'\.target (\w+)', made.asm['ptx'])[1]
        command = [ptxas, '-v', f'-arch={arch}', f'{folder}/kernel.ptx', '-o', f'{folder}/kernel.cubin']
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


for kernel, given in WIDEST + OTHERS:
    constants = given | dict(WIDE=tl.float32, BLOCK=D if given.get('NORM') else 1024)
    for capability in CAPABILITIES if (kernel, given) in WIDEST else CAPABILITIES[:1]:
        said = compiled(kernel, 'bf16', capability, constants)
        print(kernel.__name__, capability, 'bf16', *re.findall(r'Used (\d+) registers', said),
              *re.findall(r'(\d+) bytes spill', said))
