"""Failures that have nothing to do with ranks, and healthy logs: the doctor claims nothing else.

Each text is what some program prints. The doctor may report the exception itself (rank-raised) or
nothing, or a cause that is true of any program and named here.
"""

# ruff: noqa: E501

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.doctor.diagnose import diagnose_logs

SITE = "/env/lib/python3.11/site-packages"


def raised(error: str, *frames: str) -> str:
    """A traceback of a script, through a library's frames ("pandas/core/frame.py read")."""
    lines = ["Traceback (most recent call last):", '  File "/home/u/app.py", line 12, in main']
    lines.append("    result = work(path)")
    for frame in frames:
        file, function = frame.split()
        lines += [f'  File "{SITE}/{file}", line 40, in {function}', "    return self._run(x)"]
    return "\n".join([*lines, error, ""])


STARTED = "W0501 10:00:00.000000 12 torch/distributed/run.py:793] Setting OMP_NUM_THREADS environment variable for each process to be 1\n"
ENDED = "E0501 10:00:09.000000 12 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) local_rank: 1 (pid: 14) of binary: /env/bin/python\n"


def of_rank(error: str, *frames: str) -> str:
    """The same in one of torchrun's ranks."""
    text = raised(error, *frames).rstrip("\n")
    return STARTED + "".join(f"[rank1]: {line}\n" for line in text.split("\n")) + ENDED


STEPS = "".join(f"epoch {n} step {n * 100} loss {2.5 - n / 10:.3f} lr 1e-4\n" for n in range(1, 7))
HANDLING = "\nDuring handling of the above exception, another exception occurred:\n\n"
REFUSED = raised(
    "ConnectionRefusedError: [Errno 111] Connection refused", "urllib3/util/connection.py connect"
)
NO_NAME = raised(
    "socket.gaierror: [Errno -2] Name or service not known", "urllib3/util/connection.py connect"
)

# Programs that fail, for reasons of their own.
FAILING: dict[str, str] = {
    "a command that crashes": "subprocess.CalledProcessError: Command '['ffmpeg', '-i', 'x.mp4']'"
    " died with <Signals.SIGSEGV: 11>.\n",
    "a program for another CPU": "build.sh: line 5: 123 Illegal instruction     (core dumped)"
    " ./a.out\n",
    "a server that crashes": "Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f2a"
    ' (most recent call first):\n  File "/app/web.py", line 3 in handler\n',
    "a supervisor": "supervisor: process 7 terminated with signal SIGKILL; restarting\n",
    "a pod that waits": "pod/web-1 is Pending (Node had taint x, that the pod did not tolerate)\n",
    "a build that waits": "deploy PENDING (Max surge reached)\nbuild pending (Dependency: lint)\n",
    "a broker's socket": "rabbit: Socket closed [10.0.0.1:5672]\n",
    "NaN in a table": "WARNING: Detected NaN values in column 'age'\nNaN detected in 3 rows\n",
    "a screen": raised(
        "ImportError: libGL.so.1: cannot open shared object file: No such file or directory"
    ),
    "h5py": raised(
        "OSError: Unable to open file (truncated file: eof = 2048, sblock->base_addr = 0)",
        "h5py/_hl/files.py make_fid",
    ),
    "h5py synchronously": raised(
        "OSError: Unable to synchronously open file (file signature not found)",
        "h5py/_hl/files.py make_fid",
    ),
    "a name in a client": NO_NAME,
    "a name in redis": raised(
        "redis.exceptions.ConnectionError: Error -2 connecting to cache:6379. Name or service"
        " not known.",
        "redis/connection.py connect",
    ),
    "a name in kafka": raised(
        "socket.gaierror: [Errno -3] Temporary failure in name resolution", "kafka/conn.py connect"
    ),
    "a name in requests": NO_NAME
    + HANDLING
    + raised(
        "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='api.example.com',"
        " port=443): Max retries exceeded with url: /v1 (Caused by NameResolutionError)",
        "requests/adapters.py send",
    ),
    "a name in psycopg": raised(
        'psycopg2.OperationalError: could not translate host name "db" to address: Name or'
        " service not known",
        "psycopg2/__init__.py connect",
    ),
    "curl": "curl: (6) Could not resolve host: data.example.com\nmake: *** [Makefile:4: data]"
    " Error 6\n",
    "git": "fatal: unable to access 'https://github.com/u/r.git/': Could not resolve host:"
    " github.com\n",
    "pip without a network": "ERROR: Could not find a version that satisfies the requirement"
    " torchx (from versions: none)\nERROR: No matching distribution found for torchx\n",
    "pandas has no such column": raised("KeyError: 'rank'", "pandas/core/indexes/base.py get_loc"),
    "pandas has no such column, in capitals": raised(
        "KeyError: 'RANK'", "pandas/core/indexes/base.py get_loc"
    ),
    "a dictionary has no model": raised("KeyError: 'model'"),
    "a configuration has no optimizer": raised("KeyError: 'optimizer'"),
    "a zip file of data": raised(
        "zipfile.BadZipFile: File is not a zip file", "openpyxl/reader/excel.py load_workbook"
    ),
    "an npz file": raised(
        "zipfile.BadZipFile: Bad CRC-32 for file 'arr_0.npy'", "numpy/lib/format.py read_array"
    ),
    "a pickled cache": raised("EOFError: Ran out of input", "joblib/numpy_pickle.py load"),
    "a pickle of pandas": raised(
        "_pickle.UnpicklingError: pickle data was truncated", "pandas/io/pickle.py read_pickle"
    ),
    "sklearn has NaN": raised(
        "ValueError: Input X contains NaN.", "sklearn/utils/validation.py _assert_all_finite"
    ),
    "sklearn has NaN, older": raised(
        "ValueError: Input contains NaN, infinity or a value too large for dtype('float64').",
        "sklearn/utils/validation.py _assert_all_finite",
    ),
    "scipy has inf": raised(
        "ValueError: array must not contain infs or NaNs", "numpy/lib/function_base.py asarray"
    ),
    "pandas has NaN": raised(
        "pandas.errors.IntCastingNaNError: Cannot convert non-finite values (NA or inf) to integer",
        "pandas/core/dtypes/astype.py astype",
    ),
    "an import of one's own": raised(
        "ImportError: cannot import name 'helper' from partially initialized module 'app.tools'"
        " (most likely due to a circular import) (/home/u/app/tools.py)"
    ),
    "an import of a name that is not there": raised(
        "ImportError: cannot import name 'Settings' from 'config' (/home/u/config.py)"
    ),
    "an attribute of one's own module": raised(
        "AttributeError: partially initialized module 'utils' has no attribute 'load' (most likely"
        " due to a circular import)"
    ),
    "wandb's pipe": raised(
        "BrokenPipeError: [Errno 32] Broken pipe", "wandb/sdk/lib/sock_client.py send"
    ),
    "a pipe to head": raised("BrokenPipeError: [Errno 32] Broken pipe"),
    "a database's connection": raised(
        'pymysql.err.OperationalError: (2006, "MySQL server has gone away (ConnectionResetError('
        "104, 'Connection reset by peer'))\")",
        "pymysql/connections.py query",
    ),
    "a request that is reset": raised(
        "ConnectionResetError: [Errno 104] Connection reset by peer", "urllib3/connection.py send"
    )
    + HANDLING
    + raised(
        "requests.exceptions.ConnectionError: ('Connection aborted.', ConnectionResetError(104,"
        " 'Connection reset by peer'))",
        "requests/adapters.py send",
    ),
    "rabbitmq": raised(
        "pika.exceptions.StreamLostError: Stream connection lost: ConnectionResetError(104,"
        " 'Connection reset by peer')",
        "pika/adapters/blocking_connection.py process_data_events",
    ),
    "grpc": raised(
        "grpc._channel._InactiveRpcError: <_InactiveRpcError of RPC that terminated with: status ="
        ' StatusCode.UNAVAILABLE details = "Socket closed">',
        "grpc/_channel.py _end_unary_response_blocking",
    ),
    "a request that times out": raised(
        "requests.exceptions.ReadTimeout: HTTPSConnectionPool(host='s3', port=443): Read timed out."
        " (read timeout=60)",
        "requests/adapters.py send",
    ),
    "an operation that times out": raised(
        "TimeoutError: [Errno 60] Operation timed out", "urllib3/connection.py connect"
    ),
    "a lock that times out": raised(
        "filelock._error.Timeout: The file lock '/x' could not be acquired.",
        "filelock/_api.py acquire",
    ),
    "mongo": raised(
        "pymongo.errors.ServerSelectionTimeoutError: db:27017: [Errno 111] Connection refused,"
        " Timeout: 30s, Topology Description: <TopologyDescription>",
        "pymongo/topology.py select_servers",
    ),
    "elasticsearch": raised(
        "elasticsearch.ConnectionTimeout: ConnectionTimeout caused by - ReadTimeoutError()",
        "elasticsearch/connection/http_urllib3.py perform_request",
    ),
    "a web server's port": raised(
        "OSError: [Errno 98] Address already in use", "werkzeug/serving.py make_server"
    ),
    "uvicorn's port": "INFO:     Started server process [12]\nERROR:    [Errno 98] error while"
    " attempting to bind on address ('0.0.0.0', 8000): address already in use\n",
    "node's port": "Error: listen EADDRINUSE: address already in use :::3000\n"
    "    at Server.setupListenHandle [as _listen2] (net.js:1318:16)\n",
    "docker's port": "docker: Error response from daemon: driver failed programming external"
    " connectivity: Bind for 0.0.0.0:8080 failed: port is already allocated.\n",
    "nginx's port": "nginx: [emerg] bind() to 0.0.0.0:80 failed (98: Address already in use)\n",
    "gunicorn's port": "[2024-05-01 10:00:00 +0000] [7] [ERROR] Connection in use: ('0.0.0.0',"
    " 8000)\n",
    "a port of redis": "# Could not create server TCP listening socket *:6379: bind: Address"
    " already in use\n",
    "an exit of a command": raised(
        "subprocess.CalledProcessError: Command '['ffmpeg', '-i', 'x.mp4']' returned non-zero exit"
        " status 1.",
        "../subprocess.py run",
    ),
    "numpy's broadcast": raised(
        "ValueError: operands could not be broadcast together with shapes (3,4) (5,)"
    ),
    "numpy's index": raised("IndexError: index 5 is out of bounds for axis 0 with size 3"),
    "a list's index": raised("IndexError: list index out of range"),
    "a label in pandas": raised("KeyError: 'label'", "pandas/core/indexes/base.py get_loc"),
    "sklearn's labels": raised(
        "ValueError: Target is multiclass but average='binary'. Please choose another average"
        " setting.",
        "sklearn/metrics/_classification.py precision_recall_fscore_support",
    ),
    "a value out of range": raised("ValueError: label 7 out of range for this data set"),
    "keras' shapes": raised(
        "ValueError: Shapes (None, 10) and (None, 8) are incompatible",
        "keras/engine/training.py train_function",
    ),
    "a batch of one's own": raised("ValueError: batch size does not match the number of labels"),
    "a matrix": raised("numpy.linalg.LinAlgError: Singular matrix", "numpy/linalg/linalg.py inv"),
    "a rank of a matrix": raised(
        "ValueError: rank 3 must be less than 2 for a world size of terms"
    ),
    "a world of a game": raised("ValueError: world size mismatch: map is 64x64, save is 32x32"),
    "checkpoint of a spreadsheet": raised("RuntimeError: checkpoint 4 of the audit is incomplete"),
    "a state of a machine": raised("StateError: missing keys in state_dict of the workflow"),
    "json": raised(
        "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
        "../json/decoder.py raw_decode",
    ),
    "a pickle of a lambda": raised(
        "AttributeError: Can't pickle local object 'main.<locals>.<lambda>'",
        "../multiprocessing/reduction.py dump",
    ),
    "joblib's pickle": raised(
        "_pickle.PicklingError: Could not pickle the task to send it to the workers.",
        "joblib/externals/loky/process_executor.py submit",
    ),
    "joblib's workers": raised(
        "joblib.externals.loky.process_executor.TerminatedWorkerError: A worker process managed by"
        " the executor was unexpectedly terminated. This could be caused by a segmentation fault"
        " while calling the function or by an excessive memory usage causing the Operating System"
        " to kill the worker.",
        "joblib/parallel.py retrieve",
    ),
    "a pool's process": raised(
        "concurrent.futures.process.BrokenProcessPool: A process in the process pool was terminated"
        " abruptly while the future was running or pending.",
        "../concurrent/futures/process.py result",
    ),
    "spark": "24/05/01 10:00:00 ERROR Executor: Exception in task 0.0 in stage 1.0 (TID 1)\n"
    "java.lang.OutOfMemoryError: Java heap space\n",
    "spark loses an executor": "ERROR TaskSchedulerImpl: Lost executor 3 on node7: Container killed"
    " by YARN for exceeding physical memory limits. 5.5 GB of 5 GB used.\n",
    "gcc": "main.c:3:10: fatal error: foo.h: No such file or directory\ncompilation terminated.\n"
    "make: *** [Makefile:10: main.o] Error 1\n",
    "ld": "/usr/bin/ld: main.o: undefined reference to `foo'\ncollect2: error: ld returned 1 exit"
    " status\n",
    "docker build": 'ERROR: failed to solve: process "/bin/sh -c pip install -r r.txt" did not'
    " complete successfully: exit code: 1\n",
    "npm": "npm ERR! code ENOENT\nnpm ERR! enoent ENOENT: no such file or directory, open"
    " 'package.json'\n",
    "pytest": "FAILED tests/test_a.py::test_x - AssertionError: assert 1 == 2\n"
    "=========== 1 failed, 12 passed in 0.31s ===========\n",
    "pytest tells of errors in names": "tests/test_net.py::test_connection_reset_by_peer PASSED\n"
    "tests/test_net.py::test_cuda_out_of_memory_is_caught PASSED\n"
    "tests/test_net.py::test_broken_pipe PASSED\n===== 3 passed in 0.10s =====\n",
    "kubernetes": raised(
        "kubernetes.client.exceptions.ApiException: (403) Reason: Forbidden",
        "kubernetes/client/rest.py request",
    ),
    "kubernetes says pending": "NAME    READY  STATUS   RESTARTS  AGE\nweb-0   0/1    PENDING  0"
    "  (Unschedulable)\nweb-1   0/1    CANCELLED by 1000\n",
    "boto": raised(
        "botocore.exceptions.ClientError: An error occurred (403) when calling the HeadObject"
        " operation: Forbidden",
        "botocore/client.py _make_api_call",
    ),
    "boto's endpoint": NO_NAME
    + HANDLING
    + raised(
        "botocore.exceptions.EndpointConnectionError: Could not connect to the endpoint URL:"
        ' "https://s3.nowhere.amazonaws.com/"',
        "botocore/httpsession.py send",
    ),
    "the hub is away": raised(
        "OSError: We couldn't connect to 'https://huggingface.co' to load this file, couldn't find"
        " it in the cached files and it looks like bert is not the path to a directory containing a"
        " file named config.json.",
        "transformers/utils/hub.py cached_file",
    ),
    "transformers' device": raised(
        "ImportError: Using `low_cpu_mem_usage=True` or a `device_map` requires Accelerate: `pip"
        " install accelerate`",
        "transformers/modeling_utils.py from_pretrained",
    ),
    "tokenizers": raised(
        "Exception: data did not match any variant of untagged enum ModelWrapper at line 1",
        "transformers/tokenization_utils_fast.py __init__",
    ),
    "sqlite": raised("sqlite3.OperationalError: database is locked"),
    "postgres": "FATAL:  terminating connection due to administrator command\nSSL connection has"
    " been closed unexpectedly\n",
    "postgres ends": "LOG:  received SIGTERM, shutting down\nLOG:  database system is shut down\n",
    "ssh": "ssh: connect to host gpu7 port 22: Connection timed out\nclient_loop: send disconnect:"
    " Broken pipe\n",
    "rsync": "rsync: connection unexpectedly closed (0 bytes received so far)\nrsync error:"
    " unexplained error (code 255) at io.c(235) [sender=3.1.3]\n",
    "a certificate": raised(
        "ssl.SSLCertVerificationError: [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed",
        "urllib3/connection.py connect",
    ),
    "argparse": "usage: app.py [-h] [--rank RANK]\napp.py: error: unrecognized arguments: --rnk\n",
    "argparse wants a choice": "app.py: error: argument --partition: invalid choice: 'x' (choose"
    " from 'a', 'b')\n",
    "an own message about options": "error: invalid value for node: not a number\n",
    "a shell": "bash: line 3: foo: command not found\n",
    "an account": raised("ValueError: Invalid account or account/partition combination"),
    "a time limit of a solver": "CBC: time limit reached: 60 s exceeds the gap\nResult - Stopped on"
    " time limit\n",
    "a time limit of a test": "FAILED t.py::test_x - Failed: Timeout >60.0s\n",
    "a preempted actor of a game": "the scout's job was preempted by the king\n",
    "a virtual machine is preempted": "Instance web-3 was preempted.\n",
    "recursion": raised("RecursionError: maximum recursion depth exceeded"),
    "matplotlib": raised(
        "_tkinter.TclError: no display name and no $DISPLAY environment variable",
        "matplotlib/backends/_backend_tk.py create_with_canvas_class",
    ),
    "opencv": raised(
        "cv2.error: OpenCV(4.8.0) /io/resize.cpp:4065: error: (-215:Assertion failed)"
        " !ssize.empty() in function 'resize'"
    ),
    "tensorflow has no GPU": "2024-01-01 10:00:00.1: I tensorflow/core/util/port.cc:113] oneDNN"
    " custom operations are on.\nCould not find cuda drivers on your machine, GPU will not be"
    " used.\n"
    + raised(
        "ValueError: Dimensions must be equal, but are 3 and 4",
        "tensorflow/python/framework/ops.py _create_c_op",
    ),
    "jax": raised(
        "TypeError: dot_general requires contracting dimensions to have the same shape, got (3,)"
        " and (4,).",
        "jax/_src/lax/lax.py dot_general",
    ),
    "xgboost": raised(
        "xgboost.core.XGBoostError: [10:00:00] /src/objective.cc:26: Unknown objective function:"
        " `rank:x`",
        "xgboost/core.py _check_call",
    ),
    "lightgbm": raised(
        "lightgbm.basic.LightGBMError: Ranking tasks require query information",
        "lightgbm/basic.py _safe_call",
    ),
    "a key of the environment": raised("KeyError: 'API_TOKEN'", "../os.py __getitem__"),
    "an optimizer of scipy": "Optimization terminated: Operation timed out after 100 rounds.\n",
    "celery": "[2024-05-01 10:00:00,000: ERROR/MainProcess] Process 'ForkPoolWorker-2' pid:12"
    " exited with 'signal 11 (SIGSEGV)'\n",
    "airflow": "[2024-05-01T10:00:00.0+0000] {local_task_job.py:212} INFO - Task exited with return"
    " code 1\n",
    "cargo": "error[E0425]: cannot find value `rank` in this scope\n",
    "go": "panic: runtime error: index out of range [3] with length 3\n\ngoroutine 1 [running]:\n",
    "java": 'Exception in thread "main" java.net.SocketException: Connection reset by peer\n'
    "\tat java.net.SocketInputStream.read(SocketInputStream.java:210)\n",
    "java's pipe": "java.io.IOException: Broken pipe\n\tat sun.nio.ch.FileDispatcherImpl.write0\n",
    "a server's client": "2024/05/01 10:00:00 [error] 7#7: *1 recv() failed (104: Connection reset"
    " by peer) while reading response header from upstream\n",
    "a websocket": raised(
        "websockets.exceptions.ConnectionClosedError: no close frame received or sent",
        "websockets/legacy/protocol.py recv",
    ),
    "optuna": "[W 2024-05-01 10:00:00,000] Trial 3 failed with value nan because the objective"
    " function returned nan.\n[I 2024-05-01 10:01:00,000] Trial 4 finished with value: 0.3\n",
    "a message of one's own about ranks": raised("ValueError: rank of user 3 not in world ranking"),
    "sympy": raised(
        "NonInvertibleMatrixError: Matrix det == 0; not invertible.",
        "sympy/matrices/determinant.py inv",
    ),
    "an assertion of a test about NaN": raised("AssertionError: 3 of 10 columns are NaN"),
    "statsmodels": raised(
        "statsmodels.tools.sm_exceptions.MissingDataError: exog contains inf or nans",
        "statsmodels/base/data.py _handle_constant",
    ),
    "rich's box": "╭──── Traceback (most recent call last) ────╮\n│ /home/u/app.py:12 in main │\n"
    '│ ❱ 12 raise RuntimeError("CUDA out of memory")  │\n╰──────────────╯\n'
    "ValueError: the budget is negative\n",
    "a notebook": "ValueError                  Traceback (most recent call last)\n"
    "<ipython-input-15-515b> in <module>()\n      1 \n----> 2 assert free, 'CUDA out of memory'\n\n"
    "ValueError: Rank(A) < p or Rank([P; A; G]) < n\n",
    "a line of source in a traceback": raised("ValueError: bad input").replace(
        "    result = work(path)", '    assert free, "CUDA out of memory. Tried to allocate"'
    ),
    "dmesg of another program": raised("ValueError: bad input")
    + "kernel: firefox[812]: segfault at 0 ip 00007f5f sp 00007ffd error 4 in libxul.so\n",
}

# Programs that are well.
HEALTHY: dict[str, str] = {
    "InfiniBand changes its addresses": "n1:77:91 [0] transport/net_ib.cc:94 NCCL WARN NET/IB : Got"
    " async event : GID table change\n",
    "a loss that recovers": "INFO step 1 loss inf, scale 65536 -> 32768\n" + STEPS,
    "srun waited": "srun: job 7 queued and waiting for resources\nsrun: job 7 has been allocated"
    " resources\n" + STEPS,
    "srun waited and is done": "srun: job 7 queued and waiting for resources\nsrun: job 7 has been"
    " allocated resources\nhello from node3\n",
    "salloc": "salloc: Pending job allocation 9\nsalloc: job 9 queued and waiting for resources\n"
    "salloc: job 9 has been allocated resources\nsalloc: Granted job allocation 9\n",
    "a request is tried again": "WARNING urllib3: Retrying (Retry(total=2)) after connection broken"
    " by 'ConnectionResetError(104, 'Connection reset by peer')': /x\n" + STEPS,
    "an upload is tried again": "wandb: Network error (ConnectionError), entering retry loop.\n"
    + STEPS
    + "wandb: Synced 5 W&B file(s)\n",
    "an error that is caught": raised(
        "ConnectionResetError: [Errno 104] Connection reset by peer", "aiohttp/client.py _request"
    )
    + STEPS,
    "NCCL's information": "".join(
        f"node1:77:91 [{n}] NCCL INFO {text}\n"
        for n in range(2)
        for text in (
            "cudaDriverVersion 12040",
            "Bootstrap : Using eth0:10.0.0.1<0>",
            "NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.",
            "NET/IB : No device found.",
            "NET/Socket : Using [0]eth0:10.0.0.1<0>",
            "Connected all rings",
            "ncclCommInitRank comm 0x15fb64a0 rank 0 nranks 2 cudaDev 0 busId 60 - Init COMPLETE",
        )
    )
    + STEPS,
    "NCCL without InfiniBand": "ai:480:480 [0] misc/ibvwrap.cc:63 NCCL WARN Failed to open"
    " libibverbs.so[.1]\nai:480:480 [0] NCCL INFO NET/Plugin: Plugin load returned 2 :"
    " libnccl-net.so: cannot open shared object file: No such file or directory : when loading"
    " libnccl-net.so\nai:480:480 [0] NCCL INFO Using network Socket\n" + STEPS,
    "c10d's warnings": "[W socket.cpp:663] [c10d] The client socket has failed to connect to"
    " [node1]:29500 (errno: 97 - Address family not supported by protocol).\n" + STEPS,
    "c10d is late once": "[W socket.cpp:436] [c10d] The client socket has failed to connect to"
    " [::]:29500 (errno: 111 - Connection refused).\n" + STEPS,
    "a barrier that warns": "[rank0]:[W1115 10:00:00.0 ProcessGroupNCCL.cpp:4115] [PG ID 0 PG GUID"
    " 0 Rank 0]  using GPU 0 to perform barrier as devices used by this process are currently"
    " unknown.\n" + STEPS,
    "it was not destroyed": STEPS + "[rank0]:[W1115 10:00:00.0 ProcessGroupNCCL.cpp:1250] Warning:"
    " WARNING: process group has NOT been destroyed before we destruct ProcessGroupNCCL.\n",
    "a loss that begins at infinity": "best_loss: inf, patience: 5\nval_loss improved from inf to"
    " 0.412, saving model to best.pt\n" + STEPS,
    "a skipped step": "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to"
    " 32768.0\n" + STEPS,
    "help": "  --oom-retry  try again with half the batch after CUDA out of memory\n  --timeout N"
    "  seconds until a collective operation timeout\nusage: train.py [-h] [--oom-retry]\n",
    "prose": "The process was killed by the out of memory killer in the second chapter.\nShe had"
    " no GPU available, and the connection was reset by peer review.\n",
    "a list of environment variables": "NCCL_TIMEOUT=1800\nSLURM_JOB_ID=7\nSLURM_NTASKS=2\n"
    "TORCH_NCCL_ASYNC_ERROR_HANDLING=1\n" + STEPS,
    "scontrol": "JobId=7 JobName=train\n   JobState=RUNNING Reason=None Dependency=(null)\n"
    "   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0\n   TimeLimit=01:00:00\n" + STEPS,
    "sacct": "JobID    State      ExitCode\n7        COMPLETED       0:0\n",
    "a deprecation": "/env/lib/torch/utils/data.py:5: UserWarning: This DataLoader will create 16"
    " worker processes in total. Our suggested max number of worker in current system is 8\n"
    + STEPS,
    "an answer of a chat model": "Q: my job says RuntimeError: CUDA out of memory, why?\nA: the"
    " batch is too large.\n" + STEPS,
    "an answer at the end": STEPS + "sample: 'RuntimeError: Address already in use' means that a"
    " port is taken\nTraining finished in 12 minutes.\n",
    "checkpoints are loaded in part": "Some weights of the model were not used: ['cls.bias']\n"
    "<All keys matched successfully>\n" + STEPS,
    "missing keys on purpose": "missing keys in state_dict: ['head.weight'] (loaded with"
    " strict=False)\n" + STEPS,
    "lightning": "GPU available: False, used: False\nTPU available: False, using: 0 TPU cores\n"
    + STEPS
    + "`Trainer.fit` stopped: `max_epochs=3` reached.\n",
    "no GPU here, and none needed": "CUDA is not available, training on CPU\n" + STEPS,
    "tqdm": "".join(
        f"\rEpoch 1:  {n}0%|█ | {n}/10 [00:0{n}<00:0{n}, 9.8it/s, loss=0.{n}]" for n in range(1, 9)
    )
    + "\n",
    "tensorboard's port": "E0501 10:00:00.0 1 program.py:298] TensorBoard could not bind to port"
    " 6006, it was already in use\n" + STEPS,
    "DDP's stride": "Warning: Grad strides do not match bucket view strides. This may indicate grad"
    " was not created according to the gradient layout contract\n" + STEPS,
    "DDP finds none": "[W reducer.cpp:1289] Warning: find_unused_parameters=True was specified in"
    " DDP constructor, but did not find any unused parameters in the forward pass.\n" + STEPS,
    "OMP": "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default\n"
    + STEPS,
    "a worker is tried again": "worker 3: FileNotFoundError: shard-3.tar, trying the mirror\n"
    + STEPS,
    "elastic restarts and is well": "INFO: worker group restarted after failure (restart 1 of 3)\n"
    + STEPS
    + "Training complete\n",
    "a game": "player 3 was killed by signal flare\nteam timed out\nround 2: connection lost to"
    " base\n",
    "a signal of trading": "Received SIGNAL buy; order cancelled by user\n",
    "an audit": "job cancelled by user: 3, job completed: 17\n",
    "labels of a data set": "classes: ['CANCELLED', 'TIMEOUT', 'NODE_FAIL', 'PREEMPTED']\n" + STEPS,
    "requeue is a word": "message was requeued for delivery\njob 12 was requeued by the broker\n",
    "disk usage": "checking disk: 40% used, quota exceeded: no\n" + STEPS,
    "deepspeed": "[2024-05-01 10:00:00,000] [INFO] [real_accelerator.py:161:get_accelerator]"
    " Setting ds_accelerator to cuda (auto detect)\n[WARNING]  async_io requires the dev libaio"
    " .so object and headers but these were not found.\n" + STEPS,
}
# Failing and healthy ones, of which some name no exception.
# fmt: off
OTHERS: dict[str, str] = {
    'alembic': raised('sqlalchemy.exc.OperationalError: (psycopg2.OperationalError) connection to server at "db" (10.0.0.3), port 5432 failed: Connection refused', 'sqlalchemy/engine/base.py connect'),
    'flask': '127.0.0.1 - - [01/May/2024 10:00:00] "GET /rank/3 HTTP/1.1" 500 -\n' + raised("jinja2.exceptions.UndefinedError: 'rank' is undefined", 'jinja2/environment.py render'),
    'django': raised('django.core.exceptions.ImproperlyConfigured: The SECRET_KEY setting must not be empty.', 'django/conf/__init__.py __getattr__'),
    'missing env': raised("KeyError: 'HOME_PORT'", '../os.py __getitem__'),
    'os.environ RANK_ID': raised("KeyError: 'RANK_ID'", '../os.py __getitem__'),
    'spacy': raised("OSError: [E050] Can't find model 'en_core_web_sm'. It doesn't seem to be a Python package or a valid path to a data directory.", 'spacy/util.py load_model'),
    'nltk': raised('LookupError: Resource punkt not found.', 'nltk/data.py find'),
    'cuda toolkit nvcc': "nvcc fatal   : Unsupported gpu architecture 'compute_89'\nerror: command '/usr/bin/nvcc' failed with exit code 1\n",
    'pip build': '  error: subprocess-exited-with-error\n  x python setup.py bdist_wheel did not run successfully.\n  │ exit code: 1\n  ╰─> [10 lines of output]\n      RuntimeError: Cannot find CUDA_HOME\nERROR: Failed building wheel for apex\n',
    'conda': 'PackagesNotFoundError: The following packages are not available from current channels:\n  - foo\n',
    'apt': 'E: Unable to locate package foo\nE: Could not get lock /var/lib/dpkg/lock-frontend - open (11: Resource temporarily unavailable)\n',
    'cmake': 'CMake Error at CMakeLists.txt:3 (find_package):\n  Could not find a package configuration file provided by "Foo"\n',
    'terraform': 'Error: Error acquiring the state lock: ConditionalCheckFailedException\n',
    'git lfs': 'batch response: Rate limit reached\nerror: failed to fetch some objects\n',
    'ansible': 'fatal: [node3]: UNREACHABLE! => {"changed": false, "msg": "Failed to connect to the host via ssh: Connection timed out", "unreachable": true}\n',
    'systemd': "systemd[1]: foo.service: Main process exited, code=killed, status=9/KILL\nsystemd[1]: foo.service: Failed with result 'signal'.\n",
    'systemd oom': 'systemd[1]: web.service: A process of this unit has been killed by the OOM killer.\n',
    'kube crash': 'Back-off restarting failed container\nError: CrashLoopBackOff\nLast State: Terminated\n  Reason: Error\n  Exit Code: 1\n',
    'kube unreach': 'Unable to connect to the server: dial tcp 10.0.0.1:6443: i/o timeout\n',
    'etcd': 'etcdserver: request timed out\nrafthttp: lost the TCP streaming connection with peer 8e9e05c52164694d\n',
    'zookeeper': 'WARN [SendWorker:3] Connection broken for id 2, my id = 1, error = java.io.EOFException: Connection reset by peer\n',
    'hdfs': 'org.apache.hadoop.ipc.RemoteException: Name node is in safe mode.\n',
    'cassandra': 'com.datastax.driver.core.exceptions.OperationTimedOutException: [node1] Operation timed out\n',
    'mysql': 'ERROR 2013 (HY000): Lost connection to MySQL server during query\n',
    'mysql2': 'ERROR 1040 (HY000): Too many connections\n',
    'postgres full': 'could not resize shared memory segment "/PostgreSQL.1" to 1 bytes: No space left on device\n',
    'nginx': '2024/05/01 10:00:00 [alert] 7#7: *1 768 worker_connections are not enough\n',
    'celery broken': raised('kombu.exceptions.OperationalError: [Errno 111] Connection refused', 'kombu/connection.py _ensure_connection'),
    'asyncio': raised('asyncio.exceptions.TimeoutError', '../asyncio/tasks.py wait_for'),
    'asyncio cancelled': raised('asyncio.exceptions.CancelledError', '../asyncio/tasks.py wait_for'),
    'playwright': raised('playwright._impl._errors.TimeoutError: Timeout 30000ms exceeded.', 'playwright/_impl/_connection.py send'),
    'selenium': raised('selenium.common.exceptions.WebDriverException: Message: disconnected: not connected to DevTools', 'selenium/webdriver/remote/errorhandler.py check_response'),
    'scrapy': '[scrapy.downloadermiddlewares.retry] DEBUG: Retrying <GET http://x> (failed 1 times): Connection was closed cleanly.\n',
    'multiprocessing manager': raised('ConnectionRefusedError: [Errno 111] Connection refused', '../multiprocessing/managers.py connect'),
    'multiprocessing eof': raised('EOFError', '../multiprocessing/connection.py _recv'),
    'multiprocessing reset': raised('ConnectionResetError: [Errno 104] Connection reset by peer', '../multiprocessing/connection.py _recv'),
    'socket server': raised('ConnectionResetError: [Errno 104] Connection reset by peer', '../socketserver.py handle'),
    'torch single shape': raised('RuntimeError: stack expects a non-empty TensorList', 'torch/functional.py stack'),
    'torch attr': raised("AttributeError: 'DataParallel' object has no attribute 'config'", 'torch/nn/modules/module.py __getattr__'),
    'torch type': raised("TypeError: forward() missing 1 required positional argument: 'x'", 'torch/nn/modules/module.py _call_impl'),
    'torch grad': raised('RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn', 'torch/autograd/__init__.py backward'),
    'torch onnx': raised("torch.onnx.errors.UnsupportedOperatorError: Exporting the operator 'aten::x' to ONNX opset version 14 is not supported.", 'torch/onnx/utils.py export'),
    'hf offline': raised('huggingface_hub.errors.LocalEntryNotFoundError: An error happened while trying to locate the file on the Hub and we cannot find the requested files in the local cache. Please check your connection and try again or make sure your Internet connection is on.', 'huggingface_hub/file_download.py _hf_hub_download'),
    'hf gated': raised('OSError: You are trying to access a gated repo.', 'transformers/utils/hub.py cached_file'),
    'hf config': raised('ValueError: The checkpoint you are trying to load has model type `qwen3` but Transformers does not recognize this architecture.', 'transformers/models/auto/configuration_auto.py from_pretrained'),
    'hf keyerror': raised("KeyError: 'qwen3'", 'transformers/models/auto/configuration_auto.py __getitem__'),
    'hf tok': raised("ValueError: Unable to create tensor, you should probably activate truncation and/or padding with 'padding=True' 'truncation=True' to have batched tensors with the same length.", 'transformers/tokenization_utils_base.py convert_to_tensors'),
    'datasets': raised('datasets.exceptions.DatasetGenerationError: An error occurred while generating the dataset', 'datasets/builder.py _prepare_split_single'),
    'datasets cast': raised('pyarrow.lib.ArrowInvalid: JSON parse error: Column(/a) changed from string to number in row 3', 'datasets/packaged_modules/json/json.py _generate_tables'),
    'hydra': "Error executing job with overrides: []\nomegaconf.errors.ConfigAttributeError: Key 'rank' is not in struct\n    full_key: rank\n",
    'pydantic': raised('pydantic_core._pydantic_core.ValidationError: 1 validation error for Config\nrank\n  Input should be a valid integer', 'pydantic/main.py __init__'),
    'yaml': raised('yaml.scanner.ScannerError: mapping values are not allowed here', 'yaml/scanner.py fetch_value'),
    'unicode': raised("UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte", '../codecs.py decode'),
    'optuna': raised('optuna.exceptions.StorageInternalError: An exception is raised during the commit.', 'optuna/storages/_rdb/storage.py _commit'),
    'mlflow': raised('mlflow.exceptions.MlflowException: API request to endpoint /api/2.0/mlflow/runs/log-batch failed with error code 500 != 200.', 'mlflow/utils/rest_utils.py verify_rest_response'),
    'wandb': raised('wandb.errors.CommError: It appears that you do not have permission to access the requested resource.', 'wandb/sdk/lib/retry.py __call__'),
    'wandb init': raised('wandb.errors.UsageError: api_key not configured (no-tty). call wandb.login(key=[your_api_key])', 'wandb/sdk/wandb_init.py init'),
    'gym': raised('gym.error.UnregisteredEnv: No registered env with id: Foo-v0', 'gym/envs/registration.py spec'),
    'mujoco': raised('mujoco.FatalError: gladLoadGL error', 'mujoco/__init__.py x'),
    'sumo': "Error: Answered with error to command 0xa4: Vehicle 'veh1' is not known.\nConnection closed by SUMO.\n",
    'R': 'Error in solve.default(A) : \n  Lapack routine dgesv: system is exactly singular: U[2,2] = 0\nExecution halted\n',
    'julia': 'ERROR: LoadError: UndefVarError: rank not defined\nStacktrace:\n [1] top-level scope\n',
    'matlab': 'Error using rank\nNot enough input arguments.\n',
    'fortran': 'forrtl: severe (24): end-of-file during read, unit 5\n',
    'segv C': './a.out: line 3: 123 Segmentation fault      (core dumped) ./a.out\n',
    'java oom': 'Exception in thread "main" java.lang.OutOfMemoryError: GC overhead limit exceeded\n',
    'node oom': 'FATAL ERROR: Reached heap limit Allocation failed - JavaScript heap out of memory\n',
    'gpu mining': 'GPU0: out of memory, skipping DAG\n',
    'opencl': raised('pyopencl._cl.RuntimeError: clBuildProgram failed: OUT_OF_HOST_MEMORY', 'pyopencl/__init__.py build'),
    'tf gpu': "2024-05-01 10:00:00.0: W tensorflow/stream_executor/platform/default/dso_loader.cc:64] Could not load dynamic library 'libcudart.so.11.0'; dlerror: libcudart.so.11.0: cannot open shared object file: No such file or directory\n2024-05-01 10:00:00.0: I tensorflow/stream_executor/cuda/cudart_stub.cc:29] Ignore above cudart dlerror if you do not have a GPU set up on your machine.\n" + STEPS,
    'tf gpu fail': "2024-05-01 10:00:00.0: W tensorflow/stream_executor/platform/default/dso_loader.cc:64] Could not load dynamic library 'libcuda.so.1'; dlerror: libcuda.so.1: cannot open shared object file: No such file or directory\n2024-05-01 10:00:00.0: E tensorflow/stream_executor/cuda/cuda_driver.cc:271] failed call to cuInit: CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected\nEpoch 1/3\n" + raised('ValueError: Data cardinality is ambiguous', 'keras/engine/data_adapter.py _check_data_cardinality'),
    'jax gpu warn': 'WARNING:jax._src.xla_bridge:No GPU/TPU found, falling back to CPU. (Set TF_CPP_MIN_LOG_LEVEL=0 and rerun for more info.)\n' + STEPS,
    'jax oom': raised('jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes.', 'jax/_src/dispatch.py x'),
    'dask': 'distributed.nanny - WARNING - Worker exceeded 95% memory budget. Restarting\ndistributed.worker - ERROR - Connection to tcp://10.0.0.2 has been closed\n' + raised('distributed.scheduler.KilledWorker: Attempted to run task x on 4 different workers, but all those workers died while running it.', 'distributed/client.py _gather'),
    'dask comm': raised('distributed.comm.core.CommClosedError: in <TCP (closed)>: Stream is closed', 'distributed/comm/tcp.py read'),
    'prefect': "10:00:00.000 | ERROR   | Task run 'x-0' - Task run encountered an exception: Connection reset by peer\n",
    'slurm unrelated ok': 'Submitted batch job 123\n' + STEPS,
    'sacct table': 'JobID|State|Elapsed\n7|TIMEOUT|01:00:00\n8|COMPLETED|00:10:00\n9|CANCELLED by 1000|00:01:00\n',
    'sinfo': 'PARTITION AVAIL  TIMELIMIT  NODES  STATE NODELIST\ngpu*         up   infinite      1  down* n3\ngpu*         up   infinite      4   idle n[4-7]\n',
    'module load': 'Lmod has detected the following error: The following module(s) are unknown: "cuda/99"\n',
    'healthy ray': '2024-05-01 10:00:00,000\tINFO worker.py:1538 -- Started a local Ray instance.\n' + STEPS,
    'healthy deepspeed overflow': '[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768\n' + STEPS,
    'healthy scaler': 'Grad overflow on iteration 0\n[INFO] [loss_scaler.py:183:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step.\n' + STEPS,
    'healthy val nan': 'epoch 1 train_loss 0.5 val_auc nan\n' + STEPS,
    'healthy early': 'step 1 loss 2.0 grad_norm inf\n' + STEPS,
    'healthy dl warn': '[W ParallelNative.cpp:229] Warning: Cannot set number of intraop threads after parallel work has started\n' + STEPS,
    'healthy tcpstore warn': STEPS + '[rank1]:[W501 10:00:00.000 TCPStore.cpp:106] [c10d] sendBytes failed on SocketImpl(fd=3, addr=[::ffff:127.0.0.1]:5, remote=[::ffff:127.0.0.1]:29500): Broken pipe\n[rank1]:[W501 10:00:00.000 ProcessGroupNCCL.cpp:1250] Failed to check the "should dump" flag on TCPStore, (maybe TCPStore server has shut down too early), with error: Broken pipe\n',
    'healthy checkpoint': 'checkpoint 5 is complete\nresumed from checkpoint: missing keys: []\n' + STEPS,
    'healthy pytest torch': 'tests/test_dist.py::test_nccl_timeout PASSED\ntests/test_dist.py::test_address_already_in_use PASSED\n== 2 passed ==\n',
    'nohup': 'nohup: ignoring input\n' + STEPS,
    'zip': raised('zipfile.BadZipFile: File is not a zip file', 'torchvision/datasets/utils.py extract_archive'),
    'torchvision dl': raised('RuntimeError: File not found or corrupted.', 'torchvision/datasets/utils.py download_url'),
    'torchvision root': raised('RuntimeError: Dataset not found. You can use download=True to download it', 'torchvision/datasets/mnist.py __init__'),
    'np load': raised('ValueError: Cannot load file containing pickled data when allow_pickle=False', 'numpy/lib/npyio.py load'),
    'np load trunc': raised('ValueError: cannot reshape array of size 100 into shape (200,)', 'numpy/lib/format.py read_array'),
    'np eof': raised('EOFError: No data left in file', 'numpy/lib/npyio.py load'),
    'pil': raised('OSError: image file is truncated (20 bytes not processed)', 'PIL/ImageFile.py load'),
    'pil2': raised("PIL.UnidentifiedImageError: cannot identify image file 'x.jpg'", 'PIL/Image.py open'),
    'tar': raised('tarfile.ReadError: unexpected end of data', '../tarfile.py _proc_member'),
    'gzip': raised('EOFError: Compressed file ended before the end-of-stream marker was reached', '../gzip.py read'),
    'lmdb': raised('lmdb.Error: data.lmdb: No such file or directory', 'lmdb/__init__.py open'),
    'feather': raised('pyarrow.lib.ArrowInvalid: Not an Arrow file', 'pyarrow/feather.py read_table'),
    'xgb nan': raised('xgboost.core.XGBoostError: [10:00:00] label contains NaN, infinity or a value too large.', 'xgboost/core.py _check_call'),
    'catboost': raised('_catboost.CatBoostError: catboost/libs/data: Target contains only one unique value', 'catboost/core.py fit'),
    'prophet': raised('RuntimeError: Error during optimization! Command failed', 'cmdstanpy/model.py optimize'),
    'stan': 'Rejecting initial value:\n  Log probability evaluates to log(0), i.e. negative infinity.\n',
    'dist wandb pipe': of_rank('BrokenPipeError: [Errno 32] Broken pipe', 'wandb/sdk/lib/sock_client.py _sendall_with_error_handle'),
    'dist requests': of_rank("requests.exceptions.ConnectionError: ('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))", 'requests/adapters.py send'),
    'dist gaierror': of_rank('socket.gaierror: [Errno -2] Name or service not known', 'urllib3/util/connection.py create_connection'),
    'dist hf timeout': of_rank('requests.exceptions.ReadTimeout: (ReadTimeoutError("HTTPSConnectionPool(host=\'huggingface.co\', port=443): Read timed out. (read timeout=10)"), \'(Request ID: x)\')', 'huggingface_hub/utils/_http.py send'),
    'dist pandas': of_rank("KeyError: 'rank'", 'pandas/core/frame.py __getitem__'),
    'dist json': of_rank('json.decoder.JSONDecodeError: Unterminated string starting at: line 1 column 5 (char 4)', 'datasets/iterable_dataset.py __iter__'),
    'dist own': of_rank('ValueError: num_heads (12) must divide hidden size (770)'),
    'dist attr': of_rank("AttributeError: 'NoneType' object has no attribute 'shape'"),
    'dist zip': of_rank('zipfile.BadZipFile: File is not a zip file', 'numpy/lib/npyio.py load'),
    'dist sklearn': of_rank('ValueError: Input contains NaN.', 'sklearn/utils/validation.py check_array'),
    'dist sqlite': of_rank('sqlite3.OperationalError: database is locked', 'mlflow/store/db/utils.py x'),
    'dist boto': of_rank('botocore.exceptions.NoCredentialsError: Unable to locate credentials', 'botocore/auth.py add_auth'),
    'dist nltk': of_rank('LookupError: Resource punkt not found.', 'nltk/data.py find'),
    'dist compile': of_rank('torch._dynamo.exc.Unsupported: call_function BuiltinVariable(print)', 'torch/_dynamo/exc.py unimplemented'),
    'dist grpc': of_rank('grpc._channel._InactiveRpcError: <_InactiveRpcError of RPC that terminated with: status = StatusCode.UNAVAILABLE details = "failed to connect to all addresses">', 'grpc/_channel.py x'),
    'dist redis': of_rank('redis.exceptions.ConnectionError: Connection closed by server.', 'redis/connection.py read_response'),
    'dist assertion': of_rank('AssertionError: 3 tokens are out of range of the vocabulary'),
    'dist index numpy': of_rank('IndexError: index 1000 is out of bounds for axis 0 with size 1000', 'numpy/core/x.py y'),
    'dist timeout own': of_rank('TimeoutError: operation timed out', 'aiohttp/client.py _request'),
    'dist lock': of_rank("filelock._error.Timeout: The file lock '/x.lock' could not be acquired.", 'filelock/_api.py acquire'),
    'dist subprocess': of_rank("subprocess.CalledProcessError: Command '['git', 'rev-parse', 'HEAD']' returned non-zero exit status 128.", '../subprocess.py check_output'),
    'dist tokenizer': of_rank('TypeError: not a string', 'sentencepiece/__init__.py LoadFromFile'),
    'slurm own': 'srun: job 7 queued and waiting for resources\nsrun: job 7 has been allocated resources\n' + raised('ValueError: bad config') + 'srun: error: n1: task 0: Exited with exit code 1\n',
    'slurm name': raised('socket.gaierror: [Errno -2] Name or service not known', 'pymongo/pool.py connect') + 'srun: error: n1: task 0: Exited with exit code 1\n',
    'slurm healthy': 'Job ID: 123\nSLURM_JOB_NODELIST=n[1-2]\nSLURM_NTASKS=8\nTimeLimit=24:00:00\n' + STEPS + 'Done\n',
    'slurm preempt mention': '#SBATCH --requeue  # job may be preempted\n' + STEPS,
    'lightning healthy': 'Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/2\nInitializing distributed: GLOBAL_RANK: 1, MEMBER: 2/2\n----\ndistributed_backend=nccl\nAll distributed processes registered. Starting with 2 processes\n----\n' + STEPS + '`Trainer.fit` stopped: `max_epochs=3` reached.\n',
    'accelerate healthy': 'The following values were not passed to `accelerate launch` and had defaults used instead:\n\t`--num_processes` was set to a value of `2`\n' + STEPS,
    'nccl healthy': 'NCCL version 2.18.3+cuda12.1\nn1:12:34 [0] NCCL INFO comm 0x5 rank 0 nranks 8 cudaDev 0 busId 7000 - Init COMPLETE\n' + STEPS + 'n1:12:34 [0] NCCL INFO comm 0x5 rank 0 nranks 8 cudaDev 0 busId 7000 - Destroy COMPLETE\n',
    'nccl tests': '# nThread 1 nGpus 1 minBytes 8 maxBytes 128\n#       size         count      type   redop    root     time   algbw   busbw #wrong\n           8             2     float     sum      -1    27.42    0.00    0.00      0\n# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 0.000\n',
    'vllm server': 'INFO 05-01 10:00:00 llm_engine.py:100] Initializing an LLM engine\nINFO:     Uvicorn running on http://0.0.0.0:8000\nINFO:     127.0.0.1:3 - "POST /v1/completions HTTP/1.1" 200 OK\n',
    'vllm error': 'ERROR 05-01 10:00:00 [core.py:3] Traceback (most recent call last):\nERROR 05-01 10:00:00 [core.py:3]   File "/env/lib/python3.11/site-packages/vllm/config.py", line 3, in f\nERROR 05-01 10:00:00 [core.py:3]     raise ValueError\nERROR 05-01 10:00:00 [core.py:3] ValueError: Total number of attention heads (32) must be divisible by tensor parallel size (3).\n',
    'game': 'Killed 3 enemies\nPlayer Killed\n' + STEPS,
    'chess': 'rank 3 file e: illegal move\n',
    'hosts': 'node1: ok\nnode2: unreachable\n',
    'retry': 'Connection refused, retrying in 5 s\nConnection refused, retrying in 5 s\nconnected\n' + STEPS,
    'c10d retry': '[W socket.cpp:464] [c10d] The client socket has failed to connect to [n1]:29500 (errno: 111 - Connection refused).\n[W socket.cpp:464] [c10d] The client socket has failed to connect to [n1]:29500 (errno: 111 - Connection refused).\nrank 0 of 2 is ready\n' + STEPS,
    'loss inf start': 'epoch 0: best_val_loss=inf\n' + STEPS,
    'gan nan metric': 'FID: nan (not enough samples)\n' + STEPS,
    'oom retried': raised('torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.', 'torch/nn/functional.py linear') + 'batch size 32 does not fit, trying 16\n' + STEPS,
    'oom finder end': 'CUDA out of memory. Tried to allocate 2.00 GiB. batch size 64 fails\nbatch size 32 works\nFinished batch size finder, will continue with full run using batch size 32\n' + STEPS,
    'airflow': '[2024-05-01, 10:00:00 UTC] {taskinstance.py:1937} ERROR - Task failed with exception\n' + raised('airflow.exceptions.AirflowException: Bash command failed. The command returned a non-zero exit code 1.', 'airflow/operators/bash.py execute'),
    'jupyter': '[I 10:00:00.000 NotebookApp] The port 8888 is already in use, trying another port.\n[I 10:00:01.000 NotebookApp] Serving notebooks from local directory\n',
}
# fmt: on
ANYTHING = ("", "rank-raised")


def first_cause(folder: Path, text: str) -> tuple[str, str]:
    log = folder / "job.log"
    log.write_text(text)
    found = diagnose_logs([log])
    return (found[0].cause, found[0].confidence) if found else ("", "")


@pytest.mark.parametrize("name", FAILING)
def test_a_failure_of_another_kind(name: str, tmp_path: Path) -> None:
    cause, _ = first_cause(tmp_path, FAILING[name])
    assert cause in ANYTHING
    if "Traceback (most recent call last):" in FAILING[name]:
        assert cause == "rank-raised"


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_log(name: str, tmp_path: Path) -> None:
    assert first_cause(tmp_path, HEALTHY[name])[0] == ""


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_none_of_its_business(name: str, tmp_path: Path) -> None:
    cause, _ = first_cause(tmp_path, OTHERS[name])
    assert cause in ANYTHING
    if ENDED in OTHERS[name]:
        assert cause == "rank-raised"
