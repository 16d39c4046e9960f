"""TensorFlow's ParameterServerStrategy: asynchronous, scheduled by its ClusterCoordinator.

One server task holds the variables, and worker tasks run a tf.function that the coordinator schedules. Each
applies its gradients at once, with TensorFlow's own momentum kernel on the server. Several short steps are
packed into one call, as TensorFlow's guide advises.

    python benchmarks/ps_peer_tf.py async LOAD      prints one line of JSON
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from itertools import pairwise
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

from ps_clock import steady
from ps_load import LEARNING_RATE, MOMENTUM, POOL, Load

STEPS_A_CALL = 5
MANY_STEPS = 100
"""From so many timed steps on, they are short and are packed."""


def lead(load: Load) -> None:
    chief, ps, *workers = [f"127.0.0.1:{port}" for port in _free_ports(load.workers + 2)]
    cluster = {"chief": [chief], "ps": [ps], "worker": workers}
    tasks = [("chief", 0), ("ps", 0), *(("worker", rank) for rank in range(load.workers))]
    membership = [
        subprocess.Popen(
            [sys.executable, __file__, "async", load.to_json(), "--role", role],
            env=os.environ
            | {
                "OMP_NUM_THREADS": str(load.threads),
                "TF_CONFIG": json.dumps(
                    {"cluster": cluster, "task": {"type": role, "index": index}}
                ),
            },
        )
        for role, index in tasks
    ]
    try:
        while (code := membership[0].poll()) is None:
            if any(task.poll() is not None for task in membership[1:]):
                sys.exit("a TensorFlow task ended early")
            time.sleep(0.05)
    finally:
        for task in membership:
            task.kill()
            task.wait()
    sys.exit(code)


def serve(load: Load) -> None:
    import tensorflow as tf

    # With fewer threads between operations than this, functions that wait for others' never end.
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=load.threads,
        inter_op_parallelism_threads=max(4, load.workers + 2),
    )
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol="grpc",
        config=config,
        start=True,
    ).join()


def drive(load: Load) -> None:
    import tensorflow as tf

    strategy = tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.TFConfigClusterResolver()
    )
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        layers, slots = _variables(tf, load)
    steps = STEPS_A_CALL if load.steps >= MANY_STEPS else 1

    def batches() -> Any:
        """Whole batches from a pool in the worker's memory: nothing is put together a step."""
        count = POOL // load.batch
        inputs = tf.random.stateless_normal((count, load.batch, load.widths[0]), seed=(0, 0))
        targets = tf.random.stateless_uniform((count, load.batch), (0, 0), 0, 10, tf.int64)
        return tf.data.Dataset.from_tensor_slices((inputs, targets)).repeat()

    @tf.function
    def train(iterator: Any) -> None:
        for _ in tf.range(steps):
            _step(tf, layers, slots, *next(iterator))

    data = iter(coordinator.create_per_worker_dataset(tf.function(batches)))
    # Two calls a worker in flight: none waits for the coordinator. A call's end is a push's end.
    ahead = 2 * load.workers
    times: list[float] = []
    calls = -(-load.all_steps // steps) * load.workers
    skip = -(-load.warm_up // steps) * load.workers
    waiting = [coordinator.schedule(train, args=(data,)) for _ in range(ahead)]
    while len(times) < calls and not _enough(times, skip, load):
        done = [value for value in waiting if _ready(value)]
        if not done:
            time.sleep(0.0002)
            continue
        now = time.time()
        for value in done:
            waiting.remove(value)
            value.fetch()  # raises what went wrong
            times.append(now)
            waiting.append(coordinator.schedule(train, args=(data,)))
    print(json.dumps(steady([times], samples=steps * load.batch, skip=skip)), flush=True)
    os._exit(0)


def _variables(tf: Any, load: Load) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
    """Weight and bias of each layer, and their momenta, placed by the strategy."""
    layers, slots = [], []
    for fan_in, fan_out in pairwise(load.widths):
        weight = tf.random.stateless_uniform((fan_in, fan_out), (0, fan_in), -1.0, 1.0)
        layers.append((tf.Variable(weight * fan_in**-0.5), tf.Variable(tf.zeros((fan_out,)))))
        slots.append(
            (
                tf.Variable(tf.zeros((fan_in, fan_out)), trainable=False),
                tf.Variable(tf.zeros((fan_out,)), trainable=False),
            )
        )
    return layers, slots


def _step(tf: Any, layers: Any, slots: Any, inputs: Any, targets: Any) -> None:
    variables = [variable for layer in layers for variable in layer]
    momenta = [slot for pair in slots for slot in pair]
    with tf.GradientTape() as tape:
        hidden = inputs
        for number, (weight, bias) in enumerate(layers):
            hidden = tf.matmul(hidden, weight) + bias
            if number + 1 < len(layers):
                hidden = tf.nn.relu(hidden)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(targets, hidden))
    gradients = tape.gradient(loss, variables)
    for variable, momentum, gradient in zip(variables, momenta, gradients, strict=True):
        with tf.device(variable.device):
            tf.raw_ops.ResourceApplyMomentum(
                var=variable.handle,
                accum=momentum.handle,
                lr=LEARNING_RATE,
                grad=gradient,
                momentum=MOMENTUM,
            )


def _ready(value: Any) -> bool:
    """Whether a scheduled call has ended: there is no public question for one of several."""
    return bool(value._status_available_event.is_set())


def _enough(times: list[float], skip: int, load: Load) -> bool:
    return len(times) > skip + 8 and times[-1] - times[skip] > load.seconds


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", choices=["async"])
    parser.add_argument("load", type=Load.from_json)
    parser.add_argument("--role", choices=["chief", "ps", "worker"])
    given = parser.parse_args()
    if given.role is None:
        lead(given.load)
    elif given.role == "chief":
        drive(given.load)
    else:
        serve(given.load)


if __name__ == "__main__":
    main()
