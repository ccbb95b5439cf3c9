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
]


@pytest.mark.parametrize(("text", "causes"), WORDINGS)
def test_the_words_of_many_versions(text: str, causes: str, tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text(text)
    found = diagnose_logs([log])
    assert found and found[0].cause in causes.split("|")
