"""What torch 1.x and 2.x, NCCL, launchers and SLURM say, in words of many versions."""

# ruff: noqa: E501

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.doctor.diagnose import diagnose_logs

SITE = "/env/lib/python3.8/site-packages"


def raised(error: str, *frames: str) -> str:
    """A script's traceback, through torch's frames ("torch/distributed/rendezvous.py handler")."""
    lines = ["Traceback (most recent call last):", '  File "/home/u/train.py", line 12, in main']
    for frame in frames:
        file, function = frame.split()
        lines += ["    main()", f'  File "{SITE}/{file}", line 40, in {function}']
    return "\n".join([*lines, "    return x", error, ""])


INIT = (
    "torch/distributed/distributed_c10d.py init_process_group",
    "torch/distributed/rendezvous.py _env_rendezvous_handler",
)
BARRIER = ("torch/distributed/distributed_c10d.py barrier",)
# Each with the causes that are right, the best first.
WORDINGS = [
    (raised("RuntimeError: Address already in use", *INIT), "port-in-use"),
    (
        raised(
            "RuntimeError: The server socket has failed to listen on any local network address. The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).",
            *INIT,
        ),
        "port-in-use",
    ),
    (
        raised(
            "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: true, code: -98, name: EADDRINUSE, message: address already in use",
            *INIT,
        ),
        "port-in-use",
    ),
    (
        raised(
            "RuntimeError: [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/listener.cc:32] rv == 0. 98 vs 0: bind: Address already in use",
            *INIT,
        ),
        "port-in-use",
    ),
    (
        "ConnectionError: Tried to launch distributed communication on port `29500`, but another process is utilizing it. Please specify a different port (such as using the `--main_process_port` flag or specifying a different `main_process_port` in your config file) and rerun your script.\n",
        "port-in-use",
    ),
    (
        raised("RuntimeError: connect() timed out. Original timeout was 1800000 ms.", *INIT),
        "master-unreachable",
    ),
    (raised("RuntimeError: Connection timed out", *INIT), "master-unreachable"),
    (raised("RuntimeError: Connection refused", *INIT), "master-unreachable"),
    (raised("RuntimeError: No route to host", *INIT), "master-unreachable"),
    (
        raised(
            "TimeoutError: The client socket has timed out after 900s while trying to connect to (10.0.0.1, 29500).",
            *INIT,
        ),
        "master-unreachable",
    ),
    (
        raised(
            "RuntimeError: The client socket has failed to connect to any network address of (node1, 29500). The client socket has failed to connect to 10.0.0.1:29500 (errno: 110 - Connection timed out).",
            *INIT,
        ),
        "master-unreachable",
    ),
    (raised("ValueError: host not found: Name or service not known", *INIT), "master-unreachable"),
    (
        "[W socket.cpp:601] [c10d] The client socket has failed to connect to [node1]:29500 (errno: 111 - Connection refused).\n"
        * 8,
        "master-unreachable",
    ),
    (
        "[W socket.cpp:663] [c10d] The client socket has failed to connect to [node1]:29500 (errno: 110 - Connection timed out).\n"
        * 3,
        "master-unreachable",
    ),
    (
        "[W socket.cpp:401] [c10d] The server socket cannot be initialized on [::]:29500 (errno: 97 - Address family not supported by protocol).\n[E socket.cpp:922] [c10d] The client socket has timed out after 60s while trying to connect to (10.0.0.1, 29500).\n",
        "master-unreachable",
    ),
    (
        raised(
            "RuntimeError: Socket Timeout",
            *INIT,
            "torch/distributed/distributed_c10d.py _store_based_barrier",
        ),
        "rendezvous-timeout",
    ),
    (
        raised(
            "RuntimeError: Timed out initializing process group in store based barrier on rank: 3, for key: store_based_barrier_key:1 (world_size=8, worker_count=7, timeout=0:30:00)",
            *INIT,
        ),
        "rendezvous-timeout",
    ),
    (raised("torch.distributed.DistStoreError: Socket Timeout", *INIT), "rendezvous-timeout"),
    (
        raised(
            "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.",
            *INIT,
        ),
        "rendezvous-timeout",
    ),
    (
        raised(
            "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError: _matches_machine_hostname",
            "torch/distributed/elastic/rendezvous/dynamic_rendezvous.py next_rendezvous",
        ),
        "rendezvous-timeout",
    ),
    (
        raised(
            "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has failed. See inner exception for details.",
            "torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py _create_tcp_store",
        ),
        "master-unreachable",
    ),
    (
        raised(
            "RuntimeError: NCCL error in: /opt/conda/conda-bld/pytorch_1607370172916/work/torch/lib/c10d/ProcessGroupNCCL.cpp:784, unhandled system error, NCCL version 2.7.8",
            *BARRIER,
        ),
        "nccl-internal-error|nccl-connect-failed",
    ),
    (
        raised(
            "RuntimeError: NCCL error in: /pytorch/torch/lib/c10d/ProcessGroupNCCL.cpp:825, invalid usage, NCCL version 2.7.8\nncclInvalidUsage: This usually reflects invalid usage of NCCL library (such as too many async ops, too many collectives at once, mixing streams in a group, etc).",
            *BARRIER,
        ),
        "nccl-invalid-usage|duplicate-gpu",
    ),
    (
        raised(
            "RuntimeError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1269, internal error, NCCL version 2.14.3\nncclInternalError: Internal check failed.\nLast error:\nNet : Call to recv from 10.0.0.2<43521> failed : Connection refused",
            *BARRIER,
        ),
        "nccl-internal-error|nccl-connect-failed|rank-died",
    ),
    (
        raised(
            "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1691, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.19.3\nncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\nLast error:\nsocketStartConnect: Connect to 172.17.0.2<41035> failed : Software caused connection abort",
            *BARRIER,
        ),
        "nccl-connect-failed|nccl-internal-error",
    ),
    (
        raised(
            "RuntimeError: NCCL error in: /pytorch/torch/lib/c10d/ProcessGroupNCCL.cpp:784, unhandled cuda error, NCCL version 2.7.8",
            *BARRIER,
        ),
        "nccl-cuda-error",
    ),
    (
        raised(
            "RuntimeError: NCCL communicator was aborted on rank 1.  Original reason for failure was: [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(OpType=BROADCAST, Timeout(ms)=1800000) ran for 1808499 milliseconds before timing out.",
            *BARRIER,
        ),
        "rank-missing-from-collective",
    ),
    (
        "[E ProcessGroupNCCL.cpp:566] [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1803308 milliseconds before timing out.\n[E ProcessGroupNCCL.cpp:325] Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA kernels, subsequent GPU operations might run on corrupted/incomplete data. To avoid this inconsistency, we are taking the entire process down.\nterminate called after throwing an instance of 'std::runtime_error'\n  what():  [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1803308 milliseconds before timing out.\n",
        "rank-missing-from-collective",
    ),
    (
        "[E ProcessGroupNCCL.cpp:828] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=87, OpType=ALLGATHER, TensorShape=[1024], Timeout(ms)=1800000) ran for 1800116 milliseconds before timing out.\n",
        "rank-missing-from-collective",
    ),
    (
        raised(
            "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that your module has parameters that were not used in producing loss. You can enable unused parameter detection by (1) passing the keyword argument find_unused_parameters=True to torch.nn.parallel.DistributedDataParallel",
            "torch/nn/parallel/distributed.py forward",
        ),
        "ddp-unused-parameters",
    ),
    (
        raised(
            "RuntimeError: Expected to mark a variable ready only once. This error is caused by one of the following reasons: 1) Use of a module parameter outside the `forward` function.",
            "torch/autograd/__init__.py backward",
        ),
        "ddp-ready-twice",
    ),
    (
        raised(
            "RuntimeError: cuda runtime error (59) : device-side assert triggered at /pytorch/aten/src/THC/generic/THCTensorMath.cu:26"
        ),
        "cuda-device-assert",
    ),
    (
        raised(
            "RuntimeError: cuda runtime error (710) : device-side assert triggered at /pytorch/aten/src/THC/THCReduceAll.cuh:327"
        ),
        "cuda-device-assert",
    ),
    (raised("RuntimeError: CUDA error: device-side assert triggered"), "cuda-device-assert"),
    (
        raised(
            "RuntimeError: cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/generic/THCStorage.cu:58"
        ),
        "cuda-out-of-memory",
    ),
    (
        raised(
            "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 10.76 GiB total capacity; 9.71 GiB already allocated; 5.56 MiB free; 9.80 GiB reserved in total by PyTorch)"
        ),
        "cuda-out-of-memory",
    ),
    (
        raised(
            "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 3; 10.76 GiB total capacity; 9.71 GiB already allocated; 5.56 MiB free; 20.84 MiB cached)"
        ),
        "cuda-out-of-memory",
    ),
    (
        raised(
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 256.00 MiB. GPU 0 has a total capacty of 23.69 GiB of which 30.12 MiB is free. Process 1 has 23.66 GiB memory in use."
        ),
        "cuda-out-of-memory",
    ),
    (
        raised(
            "torch.cuda.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)"
        ),
        "cuda-out-of-memory",
    ),
    (
        raised(
            "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
        ),
        "cuda-out-of-memory|cuda-library-error",
    ),
    (raised("RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"), "cuda-library-error"),
    (
        raised(
            "RuntimeError: cuda runtime error (10) : invalid device ordinal at torch/csrc/cuda/Module.cpp:32"
        ),
        "invalid-device",
    ),
    (raised("RuntimeError: CUDA error: invalid device ordinal"), "invalid-device"),
    (
        raised(
            "RuntimeError: cuda runtime error (101) : invalid device ordinal at /pytorch/torch/csrc/cuda/Module.cpp:59"
        ),
        "invalid-device",
    ),
    (
        raised(
            "RuntimeError: cuda runtime error (48) : no kernel image is available for execution on the device"
        ),
        "no-kernel-image",
    ),
    (
        raised(
            "RuntimeError: cuda runtime error (38) : no CUDA-capable device is detected at /pytorch/aten/src/THC/THCGeneral.cpp:50"
        ),
        "no-gpu",
    ),
    (
        raised(
            "AssertionError: \nFound no NVIDIA driver on your system. Please check that you\nhave an NVIDIA GPU and installed a driver from\nhttp://www.nvidia.com/Download/index.aspx"
        ),
        "no-gpu",
    ),
    (
        raised(
            "AssertionError: \nThe NVIDIA driver on your system is too old (found version 10010)."
        ),
        "driver-too-old",
    ),
    (
        "usage: train.py [-h] [--local_rank LOCAL_RANK]\ntrain.py: error: unrecognized arguments: --local-rank=0\n",
        "local-rank-argument",
    ),
    (
        "usage: train.py [-h] [--lr LR]\ntrain.py: error: unrecognized arguments: --local_rank=1\n",
        "local-rank-argument",
    ),
    (
        "usage: run.py [-h]\nrun.py: error: unrecognized arguments: --local-rank 0\nERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: 2) local_rank: 0 (pid: 12) of binary: /usr/bin/python\n",
        "local-rank-argument",
    ),
    (
        "train.py: error: the following arguments are required: --local_rank\n",
        "local-rank-argument",
    ),
    (raised("KeyError: 'RANK'", "../os.py __getitem__"), "not-launched-with-launcher"),
    (raised("KeyError: 'LOCAL_RANK'", "../os.py __getitem__"), "not-launched-with-launcher"),
    (
        raised(
            "ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable MASTER_ADDR expected, but not set",
            *INIT,
        ),
        "not-launched-with-launcher",
    ),
    (
        raised(
            "RuntimeError: Default process group has not been initialized, please make sure to call init_process_group.",
            "torch/distributed/distributed_c10d.py _get_default_group",
        ),
        "not-launched-with-launcher",
    ),
    (
        raised(
            "AssertionError: Default process group is not initialized",
            "torch/distributed/distributed_c10d.py _check_default_pg",
        ),
        "not-launched-with-launcher",
    ),
    (
        raised(
            "RuntimeError: DataLoader worker (pid 1234) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory. Please try to raise your shared memory limit."
        ),
        "shared-memory-full",
    ),
    (
        raised(
            "RuntimeError: unable to open shared memory object </torch_29919_1396182366> in read-write mode"
        ),
        "shared-memory-full|too-many-open-files",
    ),
    (
        raised(
            "RuntimeError: unable to mmap 1024 bytes from file </torch_1_2>: Cannot allocate memory (12)"
        ),
        "shared-memory-full|host-out-of-memory",
    ),
    (raised("RuntimeError: DataLoader worker (pid(s) 1234) exited unexpectedly"), "worker-killed"),
    (
        raised(
            "RuntimeError: received 0 items of ancdata", "../multiprocessing/reduction.py recvfds"
        ),
        "too-many-open-files",
    ),
    (
        "slurmstepd: error: *** JOB 123 ON n1 CANCELLED AT 2020-01-01T00:00:00 DUE TO TIME LIMIT ***\n",
        "slurm-time-limit",
    ),
    (
        "slurmstepd: *** JOB 123 CANCELLED AT 2015-01-01T00:00:00 DUE TO TIME LIMIT on n1 ***\n",
        "slurm-time-limit",
    ),
    (
        "slurmstepd: error: Detected 1 oom-kill event(s) in step 123.batch cgroup. Some of your processes may have been killed by the cgroup out-of-memory handler.\n",
        "host-out-of-memory",
    ),
    (
        "slurmstepd: error: Exceeded job memory limit at some point.\nsrun: error: n1: task 0: Out Of Memory\n",
        "host-out-of-memory",
    ),
    (
        "slurmstepd: error: Job 123 exceeded memory limit (4196372 > 4194304), being killed\n",
        "host-out-of-memory",
    ),
    ("srun: error: n1: task 0: Killed\nsrun: Terminating job step 1.0\n", "rank-died"),
    ("srun: error: n1: task 3: Segmentation fault (core dumped)\n", "rank-died"),
    (
        "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified\n",
        "slurm-bad-option",
    ),
    (
        "sbatch: error: Batch job submission failed: Requested node configuration is not available\n",
        "slurm-request-impossible",
    ),
    ("srun: error: Unable to allocate resources: Invalid qos specification\n", "slurm-bad-option"),
    (
        "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)\n",
        "slurm-bad-option|slurm-request-impossible",
    ),
    (
        "sbatch: error: Memory specification can not be satisfied\nsbatch: error: Batch job submission failed: Requested node configuration is not available\n",
        "slurm-request-impossible",
    ),
    (
        "srun: error: Unable to create step for job 12: Memory required by task is not available\n",
        "slurm-request-impossible",
    ),
    ("srun: error: Unable to contact slurm controller (connect failure)\n", "slurm-unreachable"),
    (
        "slurm_load_partitions: Unable to contact slurm controller (connect failure)\n",
        "slurm-unreachable",
    ),
    (
        "srun: Job step creation temporarily disabled, retrying (Requested nodes are busy)\n",
        "slurm-pending|slurm-request-impossible",
    ),
    (
        "srun: error: Node failure on n7\nsrun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n",
        "slurm-node-failure",
    ),
    ("srun: error: task 3 launch failed: Invalid job credential\n", "slurm-clock"),
    (
        "slurmstepd: error: execve(): python3: No such file or directory\n",
        "missing-file|missing-module",
    ),
    (
        raised(
            'RuntimeError: Error(s) in loading state_dict for Net:\n\tMissing key(s) in state_dict: "conv1.weight".\n\tUnexpected key(s) in state_dict: "module.conv1.weight".',
            "torch/nn/modules/module.py load_state_dict",
        ),
        "checkpoint-keys",
    ),
    (
        raised(
            "RuntimeError: Error(s) in loading state_dict for Net:\n\tsize mismatch for fc.weight: copying a param with shape torch.Size([10, 5]) from checkpoint, the shape in current model is torch.Size([11, 5]).",
            "torch/nn/modules/module.py load_state_dict",
        ),
        "checkpoint-shape",
    ),
    (
        raised(
            "RuntimeError: unexpected EOF, expected 3302200 more bytes. The file might be corrupted.",
            "torch/serialization.py _load",
        ),
        "checkpoint-truncated",
    ),
    (
        raised(
            "RuntimeError: PytorchStreamReader failed locating file data.pkl: file not found",
            "torch/serialization.py load",
        ),
        "checkpoint-truncated",
    ),
    (
        raised("EOFError: Ran out of input", "torch/serialization.py _legacy_load"),
        "checkpoint-truncated",
    ),
    (
        raised(
            "RuntimeError: mat1 and mat2 shapes cannot be multiplied (64x512 and 256x10)",
            "torch/nn/functional.py linear",
        ),
        "batch-shape-mismatch",
    ),
    (
        raised(
            "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cuda:1! (when checking argument for argument mat1 in method wrapper_addmm)",
            "torch/nn/functional.py linear",
        ),
        "tensors-on-different-devices",
    ),
    (
        raised(
            "RuntimeError: Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same",
            "torch/nn/modules/conv.py forward",
        ),
        "tensors-on-different-devices",
    ),
    (
        raised(
            "RuntimeError: module must have its parameters and buffers on device cuda:0 (device_ids[0]) but found one of them on device: cuda:1",
            "torch/nn/parallel/data_parallel.py forward",
        ),
        "tensors-on-different-devices|backend-device-mismatch",
    ),
    (
        raised(
            "RuntimeError: Tensors must be CUDA and dense",
            "torch/distributed/distributed_c10d.py broadcast",
        ),
        "backend-device-mismatch",
    ),
    (
        raised("RuntimeError: No backend type associated with device type cpu", *BARRIER),
        "backend-device-mismatch",
    ),
    (raised("RuntimeError: Distributed package doesn't have NCCL built in", *INIT), "no-gpu"),
    (
        raised(
            "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' start method"
        ),
        "cuda-in-forked-worker",
    ),
    (
        raised(
            "RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation: [torch.cuda.FloatTensor [64]] is at version 4; expected version 3 instead."
        ),
        "backward-twice",
    ),
    (raised("ValueError: Attempting to unscale FP16 gradients."), "gradscaler-fp16-weights"),
    (
        raised("RuntimeError: CUDA error: an illegal memory access was encountered"),
        "cuda-illegal-access",
    ),
    (
        raised(
            "RuntimeError: cuda runtime error (77) : an illegal memory access was encountered at /pytorch/aten/src/THC/generic/THCStorage.cpp:184"
        ),
        "cuda-illegal-access",
    ),
    (
        raised(
            "RuntimeError: cuda runtime error (700) : an illegal memory access was encountered at x.cu:1"
        ),
        "cuda-illegal-access",
    ),
    (
        raised(
            "RuntimeError: [/opt/conda/conda-bld/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:575] Connection closed by peer [10.0.0.3]:5423",
            *BARRIER,
        ),
        "rank-died",
    ),
    (raised("RuntimeError: Broken pipe", *BARRIER), "rank-died"),
    (raised("RuntimeError: Connection reset by peer", *INIT), "rank-died|master-unreachable"),
    (
        raised(
            "RuntimeError: [Rank 0]: Rank 2 failed to pass monitoredBarrier in 1800000 ms", *BARRIER
        ),
        "rank-missing-from-collective",
    ),
    (
        raised(
            "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running inconsistent collective: CollectiveFingerPrint(OpType=ALLREDUCE, TensorShape=[1], TensorDtypes=Float",
            *BARRIER,
        ),
        "collective-mismatch",
    ),
    (
        raised(
            "RuntimeError: DDP expects same model across all ranks, but Rank 0 has 100 params, while rank 1 has inconsistent 102 params.",
            "torch/nn/parallel/distributed.py __init__",
        ),
        "model-differs-between-ranks",
    ),
    (
        raised(
            "RuntimeError: replicas[0][0] in this process with sizes [10, 5] appears not to match sizes of the same param in process 0.",
            "torch/nn/parallel/distributed.py __init__",
        ),
        "model-differs-between-ranks",
    ),
    (
        raised(
            "RuntimeError: Model replicas must have an equal number of parameters.",
            "torch/nn/parallel/distributed.py __init__",
        ),
        "model-differs-between-ranks",
    ),
    (
        raised(
            "Exception: process 0 terminated with signal SIGKILL",
            "torch/multiprocessing/spawn.py join",
        ),
        "rank-died",
    ),
    (
        raised(
            "Exception: process 1 terminated with exit code 1",
            "torch/multiprocessing/spawn.py join",
        ),
        "rank-died",
    ),
    (
        "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -9) local_rank: 0 (pid: 12) of binary: /usr/bin/python\n",
        "rank-died|host-out-of-memory",
    ),
    (
        "WARNING:torch.distributed.elastic.multiprocessing.api:Sending process 13 closing signal SIGTERM\nERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -11) local_rank: 1 (pid: 14) of binary: /usr/bin/python\n",
        "rank-died",
    ),
    (
        "[2023-01-01 00:00:00,000] [INFO] [launch.py:315:sigkill_handler] Killing subprocess 1234\n[2023-01-01 00:00:00,100] [ERROR] [launch.py:321:sigkill_handler] ['/usr/bin/python', '-u', 'train.py', '--local_rank=0'] exits with return code = -9\n",
        "rank-died|host-out-of-memory",
    ),
    (
        "[2023-01-01 00:00:00,100] [ERROR] [launch.py:321:sigkill_handler] ['/usr/bin/python', '-u', 'train.py', '--local_rank=3'] exits with return code = -11\n",
        "rank-died",
    ),
    (
        raised(
            "subprocess.CalledProcessError: Command '['/usr/bin/python', '-u', 'train.py', '--local_rank=1']' died with <Signals.SIGKILL: 9>.",
            "torch/distributed/launch.py main",
        ),
        "rank-died|host-out-of-memory",
    ),
    ("OSError: [Errno 28] No space left on device\n", "disk-full"),
    (
        "n1:12:34 [0] NCCL WARN NET/IB : Got completion from peer 10.0.0.1<1234> with error 12, opcode 0, len 0, vendor err 129\n",
        "nccl-ib-failure",
    ),
    ("n1:12:34 [0] misc/ibvwrap.cc:252 NCCL WARN Call to ibv_reg_mr failed\n", "nccl-ib-failure"),
    (
        "n1:12:34 [0] include/socket.h:403 NCCL WARN Connect to 10.0.0.2<1234> failed : Connection timed out\n",
        "nccl-connect-failed",
    ),
    (
        "n1:12:34 [0] bootstrap.cc:40 NCCL WARN Bootstrap : no socket interface found\n",
        "wrong-network-interface",
    ),
    (
        "n1:12:34 [0] include/shm.h:28 NCCL WARN Call to posix_fallocate failed : No space left on device\n",
        "shared-memory-full",
    ),
    (
        "n1:12:34 [0] misc/cudawrap.cc:112 NCCL WARN Cuda failure 'CUDA driver version is insufficient for CUDA runtime version'\n",
        "driver-too-old|nccl-cuda-error",
    ),
    (
        raised(
            "pytorch_lightning.utilities.exceptions.MisconfigurationException: You requested GPUs: [0, 1, 2, 3]\n But your machine only has: [0, 1]",
            "pytorch_lightning/utilities/device_parser.py _sanitize_gpu_ids",
        ),
        "invalid-device",
    ),
    (
        "Loss is nan, stopping training\n{'loss_classifier': tensor(nan, device='cuda:0')}\n",
        "nan-loss",
    ),
    (raised("FloatingPointError: Loss became infinite or NaN at iteration=1!"), "nan-loss"),
    (
        "FloatingPointError: Minimum loss scale reached (0.0001). Your loss is probably exploding.\n",
        "loss-scale-underflow|nan-loss",
    ),
    (raised("OSError: [Errno 12] Cannot allocate memory", "../os.py fork"), "host-out-of-memory"),
    (
        raised(
            "ImportError: /env/lib/python3.8/site-packages/torch/lib/libtorch_cuda.so: undefined symbol: ncclCommRegister"
        ),
        "library-mismatch",
    ),
    (
        'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\n  File "/usr/lib/python3.8/multiprocessing/spawn.py", line 116, in spawn_main\n    exitcode = _main(fd, parent_sentinel)\n_pickle.UnpicklingError: pickle data was truncated\n',
        "rank-raised|rank-died",
    ),
    (raised("RuntimeError: connect() timed out.", *INIT), "master-unreachable"),
    (raised("RuntimeError: Wait timeout", *INIT), "rendezvous-timeout"),
    # Cut by a terminal of 80 columns.
    (
        raised(
            "RuntimeError: Expected to have finished reduction in the prior iteration befo\n"
            "re starting a new one. This error indicates that your module has parameters t\n"
            "hat were not used in producing loss.",
            "torch/nn/parallel/distributed.py forward",
        ),
        "ddp-unused-parameters",
    ),
    (
        "[2024-02-27T21:35:28.41Z] fa88a9df [rank=5] || RuntimeError: DDP expects same model across all ranks, but Rank 5 has 8 params, while rank 0 has inconsistent 0 params.\n",
        "model-differs-between-ranks",
    ),
    (
        "train.py FAILED\n=====\nRoot Cause:\n[0]:\n  time: 2021-09-26_09:57:12\n  rank: 1 (local_rank: 1)\n  exitcode: -9 (pid: 4139)\n  error_file: <N/A>\n",
        "rank-died|host-out-of-memory",
    ),
    (
        "ERROR 03-27 22:19:40 [core.py:367] Traceback (most recent call last):\n"
        'ERROR 03-27 22:19:40 [core.py:367]   File "/env/site-packages/torch/distributed/rendezvous.py", line 4, in f\n'
        "ERROR 03-27 22:19:40 [core.py:367]     TCPStore()\n"
        "ERROR 03-27 22:19:40 [core.py:367] RuntimeError: Connection refused\n",
        "master-unreachable",
    ),
    (
        raised(
            "RuntimeError: It looks like your LightningModule has parameters that were not used in producing the loss returned by training_step. If this is intentional, you must enable the detection of unused parameters in DDP",
            "lightning/pytorch/strategies/ddp.py x",
        ),
        "ddp-unused-parameters",
    ),
    (
        raised(
            "RuntimeError: Rank 1 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank.",
            *BARRIER,
        ),
        "rank-died|rank-missing-from-collective",
    ),
    (
        raised(
            "torch.distributed.DistBackendError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: Socket Timeout",
            *BARRIER,
        ),
        "rank-missing-from-collective|rank-died|master-unreachable",
    ),
    (
        raised(
            "torch.distributed.DistBackendError: [3] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: Connection reset by peer",
            *BARRIER,
        ),
        "rank-died|rank-missing-from-collective",
    ),
    (
        raised(
            "RuntimeError: [1] is setting up NCCL communicator and retreiving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: Socket Timeout",
            *BARRIER,
        ),
        "rank-missing-from-collective|rank-died",
    ),
    (
        raised(
            "RuntimeError: Timed out waiting 1800000ms for recv operation to complete", *BARRIER
        ),
        "rank-missing-from-collective",
    ),
    (
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 4\n",
        "collective-mismatch",
    ),
    (
        "terminate called after throwing an instance of 'c10::CUDAError'\n  what():  CUDA error: unspecified launch failure\n",
        "cuda-illegal-access",
    ),
    (
        "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: device-side assert triggered\nException raised from createEvent at ../aten/src/ATen/cuda/CUDAEvent.h:166 (most recent call first):\n",
        "cuda-device-assert",
    ),
    (
        raised("RuntimeError: CUDA error: initialization error"),
        "cuda-in-forked-worker|no-gpu|rank-raised",
    ),
    (raised("RuntimeError: CUDA driver error: out of memory"), "cuda-out-of-memory"),
    (raised("torch.cuda.OutOfMemoryError: CUDA out of memory."), "cuda-out-of-memory"),
    (
        raised(
            "RuntimeError: [enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes. Error code 12 (Cannot allocate memory)"
        ),
        "host-out-of-memory",
    ),
    (
        raised(
            "RuntimeError: DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes."
        ),
        "host-out-of-memory",
    ),
    (
        raised("RuntimeError: $ Torch: not enough memory: you tried to allocate 2GB. Buy new RAM!"),
        "host-out-of-memory",
    ),
    (
        "run.sh: line 7: 12345 Killed                  python -m torch.distributed.launch --nproc_per_node=4 train.py\n",
        "rank-died|host-out-of-memory|terminated-by-signal",
    ),
    (
        "run.sh: line 7: 12345 Bus error               (core dumped) python train.py\n",
        "rank-died|shared-memory-full",
    ),
    (
        "run.sh: line 7: 12345 Aborted                 (core dumped) torchrun train.py\n",
        "rank-died",
    ),
    (
        "--------------------------------------------------------------------------\nPrimary job  terminated normally, but 1 process returned\na non-zero exit code. Per user-direction, the job has been aborted.\n--------------------------------------------------------------------------\nmpirun detected that one or more processes exited with non-zero status, thus causing\nthe job to be terminated. The first process to do so was:\n\n  Process name: [[1,1],1]\n  Exit code:    1\n",
        "rank-died|cause-in-another-log",
    ),
    (
        "mpirun noticed that process rank 3 with PID 0 on node n1 exited on signal 9 (Killed).\n",
        "rank-died",
    ),
    (
        "[1,1]<stderr>:RuntimeError: CUDA out of memory. Tried to allocate 2.00 MiB (GPU 0; 10.00 GiB total capacity; 9.00 GiB already allocated; 1.00 MiB free; 9.10 GiB reserved in total by PyTorch)\n",
        "cuda-out-of-memory",
    ),
    (
        "[1,0]<stderr>:horovod.common.exceptions.HorovodInternalError: Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to allreduce, allgather or broadcast a tensor after one of the ranks finished execution.\n",
        "rank-died|uneven-inputs|cause-in-another-log",
    ),
    (
        "[2022-01-01 10:00:00.000000: W horovod/common/stall_inspector.cc:107] One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are waiting for remainder of ranks for more than 60 seconds.\nMissing ranks:\n1: [allreduce.grad]\n",
        "rank-missing-from-collective",
    ),
    (
        raised(
            "RuntimeError: Cuda error: no kernel image is available for execution on the device [/opt/x.cu:11]"
        ),
        "no-kernel-image",
    ),
    (
        raised("RuntimeError: Trying to create tensor with negative dimension -1: [-1, 512]"),
        "rank-raised",
    ),
    (
        raised(
            "RuntimeError: Caught RuntimeError in replica 1 on device 1.\nOriginal Traceback (most recent call last):",
            "torch/nn/parallel/data_parallel.py forward",
        ),
        "rank-raised",
    ),
    (
        raised(
            "AssertionError: DistributedDataParallel is not needed when a module doesn't have any parameters that require a gradient.",
            "torch/nn/parallel/distributed.py __init__",
        ),
        "ddp-no-gradients",
    ),
    (
        raised("ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!", *INIT),
        "no-gpu",
    ),
    (
        raised("RuntimeError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!", *INIT),
        "no-gpu",
    ),
    (
        raised("AssertionError: Invalid device id", "torch/cuda/__init__.py set_device"),
        "invalid-device",
    ),
    (
        raised(
            "ValueError: DistributedDataParallel device_ids and output_device arguments only work with single-device/multiple-device GPU modules or CPU modules, but got device_ids [0], output_device 0, and module parameters {device(type='cpu')}.",
            "torch/nn/parallel/distributed.py __init__",
        ),
        "backend-device-mismatch",
    ),
    (
        raised(
            "RuntimeError: Input, output and indices must be on the current device",
            "torch/nn/functional.py embedding",
        ),
        "tensors-on-different-devices",
    ),
    (
        raised(
            "RuntimeError: Expected object of backend CPU but got backend CUDA for argument #4 'mat1'",
            "torch/nn/functional.py linear",
        ),
        "tensors-on-different-devices",
    ),
    (
        raised("RuntimeError: expected device cuda:0 but got device cpu"),
        "tensors-on-different-devices",
    ),
    (
        raised(
            "RuntimeError: binary_op(): expected both inputs to be on same device, but input a is on cuda:1 and input b is on cuda:0"
        ),
        "tensors-on-different-devices",
    ),
    (
        raised(
            "RuntimeError: Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor) should be the same"
        ),
        "dtype-mismatch|tensors-on-different-devices",
    ),
    (raised("RuntimeError: expected scalar type Half but found Float"), "dtype-mismatch"),
    (
        raised(
            "RuntimeError: Expected object of scalar type Long but got scalar type Float for argument #2 'target'"
        ),
        "dtype-mismatch",
    ),
    (
        raised("IndexError: index out of range in self", "torch/nn/functional.py embedding"),
        "label-out-of-range",
    ),
    (
        raised(
            "RuntimeError: index out of range: Tried to access index 5 out of table with 4 rows. at /pytorch/aten/src/TH/generic/THTensorEvenMoreMath.cpp:418"
        ),
        "label-out-of-range",
    ),
    (
        raised(
            "RuntimeError: Assertion `cur_target >= 0 && cur_target < n_classes' failed.  at /pytorch/aten/src/THNN/generic/ClassNLLCriterion.c:97"
        ),
        "label-out-of-range",
    ),
    (
        "/pytorch/aten/src/THCUNN/ClassNLLCriterion.cu:105: void cunn_ClassNLLCriterion_updateOutput_kernel: block: [0,0,0], thread: [1,0,0] Assertion `t >= 0 && t < n_classes` failed.\n",
        "cuda-device-assert",
    ),
    (
        "../aten/src/ATen/native/cuda/Indexing.cu:1146: indexSelectLargeIndex: block: [1,0,0], thread: [0,0,0] Assertion `srcIndex < srcSelectDimSize` failed.\n",
        "cuda-device-assert",
    ),
    (
        raised(
            "RuntimeError: size mismatch, m1: [64 x 512], m2: [256 x 10] at /pytorch/aten/src/THC/generic/THCTensorMathBlas.cu:268"
        ),
        "batch-shape-mismatch",
    ),
    (
        raised(
            "RuntimeError: invalid argument 0: Sizes of tensors must match except in dimension 0. Got 3 and 1 in dimension 1 at /pytorch/aten/src/TH/generic/THTensor.cpp:612"
        ),
        "batch-shape-mismatch",
    ),
    (
        raised(
            "RuntimeError: Sizes of tensors must match except in dimension 1. Expected size 8 but got size 7 for tensor number 1 in the list."
        ),
        "batch-shape-mismatch",
    ),
    (
        raised(
            "RuntimeError: Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):"
        ),
        "worker-raised",
    ),
    (
        raised("RuntimeError: DataLoader worker (pid 1) is killed by signal: Segmentation fault. "),
        "worker-killed",
    ),
    (
        raised("RuntimeError: DataLoader worker (pid 1) is killed by signal: Killed. "),
        "worker-killed|host-out-of-memory",
    ),
    (
        raised(
            "RuntimeError: DataLoader worker (pid 1) exited unexpectedly with exit code 1. Details are lost due to multiprocessing. Rerunning with num_workers=0 may give better error trace."
        ),
        "worker-killed",
    ),
    (raised("OSError: [Errno 24] Too many open files: '/data/x'"), "too-many-open-files"),
    (raised("RuntimeError: unable to write to file </torch_123_456>"), "shared-memory-full"),
    (
        raised(
            "RuntimeError: unable to resize file </torch_1_2> to the right size: Invalid argument (22)"
        ),
        "shared-memory-full|rank-raised",
    ),
    (
        raised("RuntimeError: Unable to find a valid cuDNN algorithm to run convolution"),
        "cuda-out-of-memory|cuda-library-error",
    ),
    (raised("RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"), "cuda-library-error"),
    (
        raised(
            "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa)`"
        ),
        "cuda-library-error",
    ),
    (
        raised("RuntimeError: CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx`"),
        "cuda-library-error",
    ),
    (
        raised(
            "RuntimeError: cublas runtime error : the GPU program failed to execute at /pytorch/aten/src/THC/THCBlas.cu:450"
        ),
        "cuda-library-error",
    ),
    (
        raised(
            "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that might have already set an error? Error 804: forward compatibility was attempted on non supported HW"
        ),
        "driver-too-old",
    ),
    (
        raised(
            "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 803: system has unsupported display driver / cuda driver combination"
        ),
        "driver-too-old",
    ),
    (
        raised(
            "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized"
        ),
        "nvswitch-error|no-gpu",
    ),
    (
        raised(
            "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env variable CUDA_VISIBLE_DEVICES after program start. Setting the available devices to be zero."
        ),
        "no-gpu",
    ),
    (
        "/env/torch/cuda/__init__.py:52: UserWarning: CUDA initialization: The NVIDIA driver on your system is too old (found version 10010).\n"
        + raised("RuntimeError: No CUDA GPUs are available"),
        "driver-too-old|no-gpu",
    ),
    (
        "NVIDIA GeForce RTX 3090 with CUDA capability sm_86 is not compatible with the current PyTorch installation.\n"
        + raised(
            "RuntimeError: CUDA error: no kernel image is available for execution on the device"
        ),
        "no-kernel-image",
    ),
    (
        raised(
            "deepspeed.runtime.zero.utils.ZeRORuntimeException: You are using ZeRO-Offload with a client provided optimizer"
        ),
        "rank-raised",
    ),
    (
        "[2023-01-01 10:00:00,000] [INFO] [loss_scaler.py:188:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 1, reducing to 1\n"
        + raised(
            "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",
            "deepspeed/runtime/fp16/loss_scaler.py update_scale",
        ),
        "loss-scale-underflow",
    ),
    (
        raised(
            "AssertionError: Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size 32 != 4 * 1 * 4",
            "deepspeed/runtime/config.py _batch_assertion",
        ),
        "rank-count-mismatch|rank-raised",
    ),
    (
        raised(
            "RuntimeError: weight should have at least three dimensions",
            "torch/nn/modules/conv.py forward",
        ),
        "rank-raised",
    ),
    (
        raised("RuntimeError: 'weight' must be 2-D", "torch/nn/functional.py embedding"),
        "rank-raised|fsdp-wrap-error",
    ),
    (
        raised(
            "RuntimeError: expected mat1 and mat2 to have the same dtype, but got: float != c10::BFloat16"
        ),
        "dtype-mismatch",
    ),
    (
        raised("RuntimeError: Function BroadcastBackward returned an invalid gradient at index 0"),
        "rank-raised",
    ),
    (
        raised(
            "RuntimeError: Trying to backward through the graph a second time, but the buffers have already been freed. Specify retain_graph=True when calling backward the first time."
        ),
        "backward-twice",
    ),
    (
        raised(
            "RuntimeError: Given groups=1, weight of size [64, 3, 7, 7], expected input[8, 1, 224, 224] to have 3 channels, but got 1 channels instead"
        ),
        "batch-shape-mismatch",
    ),
    (
        raised(
            "ValueError: Expected more than 1 value per channel when training, got input size torch.Size([1, 256, 1, 1])"
        ),
        "batch-shape-mismatch",
    ),
    (
        raised("ValueError: Expected input batch_size (324) to match target batch_size (4)."),
        "batch-shape-mismatch",
    ),
    (
        raised(
            "_pickle.UnpicklingError: Weights only load failed. Re-running `torch.load` with `weights_only` set to `False` will likely succeed",
            "torch/serialization.py load",
        ),
        "checkpoint-unsafe-pickle",
    ),
    (
        raised(
            "RuntimeError: Attempting to deserialize object on CUDA device 3 but torch.cuda.device_count() is 1.",
            "torch/serialization.py validate_cuda_device",
        ),
        "invalid-device",
    ),
    (
        raised(
            "RuntimeError: storage has wrong size: expected -452 got 64",
            "torch/serialization.py _load",
        ),
        "checkpoint-truncated",
    ),
    (
        raised(
            "RuntimeError: Invalid magic number; corrupt file?",
            "torch/serialization.py _legacy_load",
        ),
        "checkpoint-truncated",
    ),
    (
        raised(
            "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge",
            "safetensors/torch.py load_file",
        ),
        "checkpoint-truncated",
    ),
    (
        raised(
            "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer",
            "transformers/modeling_utils.py load_state_dict",
        ),
        "checkpoint-truncated",
    ),
    (
        "srun: error: n1: task 0: Exited with exit code 1\nsrun: Terminating job step 12.0\nslurmstepd: error: *** STEP 12.0 ON n1 CANCELLED AT 2021-01-01T00:00:00 ***\n",
        "rank-died|job-cancelled",
    ),
    (
        "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2021-01-01T00:00:00 DUE TO PREEMPTION ***\n",
        "slurm-preempted",
    ),
    ("slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2021-01-01T00:00:00 ***\n", "job-cancelled"),
    (
        "slurmstepd: error: *** JOB 12 STEPD TERMINATED ON n1 AT 2021-01-01T00:00:00 DUE TO JOB NOT ENDING WITH SIGNALS ***\n",
        "job-cancelled|slurm-node-failure",
    ),
    (
        "sbatch: error: Batch script contains DOS line breaks (\\r\\n)\nsbatch: error: instead of expected UNIX line breaks (\\n).\n",
        "slurm-bad-option",
    ),
    ("sbatch: error: Unable to open file train.sbatch\n", "slurm-bad-option|missing-file"),
    ("sbatch: error: Invalid directive found in batch script: --gpu\n", "slurm-bad-option"),
    (
        "srun: fatal: SLURM_MEM_PER_CPU, SLURM_MEM_PER_GPU, and SLURM_MEM_PER_NODE are mutually exclusive.\n",
        "slurm-bad-option",
    ),
    (
        "srun: fatal: cpus-per-task set by two different environment variables SLURM_CPUS_PER_TASK=1 != SLURM_TRES_PER_TASK=cpu:8\n",
        "slurm-bad-option",
    ),
    (
        "sbatch: error: Batch job submission failed: Invalid partition name specified\n",
        "slurm-bad-option",
    ),
    (
        "salloc: error: Job submit/allocate failed: Invalid account or account/partition combination specified\n",
        "slurm-bad-option",
    ),
    (
        "srun: error: Unable to create step for job 1: Requested node configuration is not available\n",
        "slurm-request-impossible",
    ),
    (
        "srun: error: Unable to create step for job 1: Invalid generic resource (gres) specification\n",
        "slurm-request-impossible|slurm-bad-option",
    ),
    (
        "srun: error: Unable to confirm allocation for job 1: Invalid job id specified\n",
        "slurm-bad-option",
    ),
    (
        "sbatch: error: CPU count per node can not be satisfied\nsbatch: error: Batch job submission failed: Requested node configuration is not available\n",
        "slurm-request-impossible",
    ),
    (
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n",
        "slurm-unreachable",
    ),
    (
        "srun: error: slurm_receive_msgs: Socket timed out on send/recv operation\nsrun: error: Task launch for 1.0 failed on node n2: Socket timed out on send/recv operation\n",
        "slurm-unreachable|slurm-node-failure",
    ),
    (
        "srun: error: Task launch for StepId=1.0 failed on node n3: Communication connection failure\n",
        "slurm-node-failure|slurm-unreachable",
    ),
    (
        "JOBID PARTITION     NAME     USER ST       TIME  NODES NODELIST(REASON)\n  123       gpu    train        u PD       0:00      2 (QOSMaxGRESPerUser)\n",
        "slurm-pending",
    ),
    (
        "JOBID PARTITION     NAME     USER ST       TIME  NODES NODELIST(REASON)\n  123       gpu    train        u PD       0:00      2 (Resources)\n",
        "slurm-pending",
    ),
    (
        "slurmstepd: error: couldn't chdir to `/scratch/x': No such file or directory: going to /tmp instead\n"
        + raised("FileNotFoundError: [Errno 2] No such file or directory: 'config.yaml'"),
        "missing-file",
    ),
    (
        "/var/spool/slurmd/job1/slurm_script: line 10: torchrun: command not found\n",
        "missing-module|missing-file",
    ),
    (
        "slurmstepd: error: execve(): train.py: Permission denied\n",
        "permission-denied|slurm-bad-option",
    ),
    ("python: can't open file 'train.py': [Errno 2] No such file or directory\n", "missing-file"),
    ("/usr/bin/python: No module named torch.distributed.launch\n", "missing-module"),
    (raised("ModuleNotFoundError: No module named 'apex'"), "missing-module"),
    (
        raised(
            "ImportError: libcudart.so.10.2: cannot open shared object file: No such file or directory"
        ),
        "library-mismatch",
    ),
    (
        raised(
            "ImportError: /lib/x86_64-linux-gnu/libstdc++.so.6: version `GLIBCXX_3.4.29' not found (required by x.so)"
        ),
        "library-mismatch",
    ),
    (
        raised("OSError: libnccl.so.2: cannot open shared object file: No such file or directory"),
        "library-mismatch",
    ),
    (
        raised(
            "RuntimeError: Detected that PyTorch and torch_sparse were compiled with different CUDA versions."
        ),
        "library-mismatch",
    ),
    (
        "n1:1:2 [0] init.cc:1000 NCCL WARN Mismatched NCCL version detected : rank 0 version 21003 rank 1 version 20804\n",
        "nccl-version-mismatch",
    ),
    (
        "n1:1:2 [0] transport/net_ib.cc:100 NCCL WARN NET/IB : Got async event : port error\n",
        "nccl-ib-failure",
    ),
    (
        "n1:1:2 [0] transport/p2p.cc:136 NCCL WARN Cuda failure 'peer access is not supported between these two devices'\n",
        "nccl-cuda-error",
    ),
    (
        "n1:1:2 [0] proxy.cc:1 NCCL WARN [Service thread] Accept failed Resource temporarily unavailable\nn1:1:2 [0] misc/socket.cc:1 NCCL WARN socketProgressOpt: Call to recv from 10.0.0.1<5> failed : Connection reset by peer\n",
        "rank-died",
    ),
    (
        "n1:1:2 [0] init.cc:521 NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000\n",
        "duplicate-gpu",
    ),
    ("NVRM: Xid (PCI:0000:0a:00): 79, pid=1, GPU has fallen off the bus.\n", "gpu-lost|gpu-xid"),
    ("Unable to determine the device handle for GPU 0000:0A:00.0: Unknown Error\n", "gpu-lost"),
    (
        "Failed to initialize NVML: Driver/library version mismatch\n",
        "driver-too-old|library-mismatch|no-gpu",
    ),
    (
        "Failed to initialize NVML: Unknown Error\n"
        + raised("RuntimeError: No CUDA GPUs are available"),
        "no-gpu",
    ),
]


@pytest.mark.parametrize(("text", "causes"), WORDINGS)
def test_the_words_of_many_versions(text: str, causes: str, tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text(text)
    found = diagnose_logs([log])
    assert found and found[0].cause in causes.split("|")
