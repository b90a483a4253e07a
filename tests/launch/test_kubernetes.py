"""launch/kubernetes/: the manifests are valid, and their command survives evictions and killed processes.

There is no cluster. The tests run a pod's container as a process, in the environment that its manifest,
JobSet and Kubeflow Trainer would set, and apply the manifest's rules for failed pods.
"""
import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from helpers import FAULTS, ROOT, TESTS, TINY, curve, free_port, read_run, run_script, saved_iterations

from kilogpt.run import checkpoint

pytestmark = pytest.mark.slow
FOLDER = pathlib.Path(ROOT, 'launch', 'kubernetes')
RUNTIMES = 'jobset.yaml', 'runtime.yaml'
KUBERNETES = '1.34'  # the version whose API schemas the manifests are checked against
STOPPED = 143


def manifests(name):
    """The documents of a file, as the API server reads them."""
    yaml = pytest.importorskip('yaml')
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def manifest(name):
    document, = manifests(name)
    return document


def jobset_spec(name):
    """The specification of a JobSet, which a TrainingRuntime has as its template."""
    spec = manifest(name)['spec']
    return spec['template']['spec'] if name == 'runtime.yaml' else spec


def job_template(name):
    replicated_job, = jobset_spec(name)['replicatedJobs']
    assert replicated_job['name'] == 'node'  # Kubeflow Trainer requires this name
    return replicated_job['template']


def pod_spec(name):
    return job_template(name)['spec']['template']['spec']


def container(name):
    found, = pod_spec(name)['containers']
    return found


# --- the manifests ------------------------------------------------------------------------------------------

@pytest.mark.parametrize('name', ['jobset.yaml', 'runtime.yaml', 'trainjob.yaml'])
def test_manifest_is_valid_in_the_apis_of_jobset_and_kubeflow_trainer(name):
    models = pytest.importorskip('kubeflow_trainer_api.models')
    kinds = dict(JobSet=models.JobsetV1alpha2JobSet, TrainJob=models.TrainerV1alpha1TrainJob,
                 TrainingRuntime=models.TrainerV1alpha1TrainingRuntime)
    document = manifest(name)
    parsed = kinds[document['kind']].from_dict(document)
    assert parsed.to_dict() == document  # the models drop unknown fields


@pytest.mark.parametrize('name', RUNTIMES)
def test_job_is_valid_in_kubernetes(name):
    kubernetes_validate = pytest.importorskip('kubernetes_validate')
    job = dict(apiVersion='batch/v1', kind='Job', metadata=dict(name='node'), spec=job_template(name)['spec'])
    kubernetes_validate.validate(job, KUBERNETES, strict=True)
    job['spec']['template']['spec']['containers'][0]['arg'] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, KUBERNETES, strict=True)


def test_claims_are_valid_in_kubernetes_and_mounted_by_the_pods():
    kubernetes_validate = pytest.importorskip('kubernetes_validate')
    claims = manifests('storage.yaml')
    for claim in claims:
        kubernetes_validate.validate(claim, KUBERNETES, strict=True)
    for name in RUNTIMES:
        volumes = [volume['persistentVolumeClaim']['claimName'] for volume in pod_spec(name)['volumes']
                   if 'persistentVolumeClaim' in volume]
        assert volumes == [claim['metadata']['name'] for claim in claims]
        mounts = {mount['name'] for mount in container(name)['volumeMounts']}
        assert mounts == {volume['name'] for volume in pod_spec(name)['volumes']}


def test_both_ways_run_the_same_pod():
    """A TrainJob in its runtime equals the JobSet, except for the variables that Kubeflow Trainer sets."""
    trainer = manifest('trainjob.yaml')['spec']['trainer']
    jobset, runtime = container('jobset.yaml'), container('runtime.yaml')
    merged = runtime | dict(image=trainer['image'], args=trainer['args'],
                            resources=trainer['resourcesPerNode'])
    assert {key: value for key, value in merged.items() if key != 'env'} == {
        key: value for key, value in jobset.items() if key != 'env'}
    set_by_trainer = {'PET_NNODES', 'PET_NPROC_PER_NODE', 'PET_NODE_RANK', 'PET_MASTER_ADDR',
                      'PET_MASTER_PORT'}
    variables = {variable['name'] for variable in jobset['env']}
    assert variables - {variable['name'] for variable in runtime['env']} == set_by_trainer
    assert pod_spec('jobset.yaml') | dict(containers=[]) == pod_spec('runtime.yaml') | dict(containers=[])
    for key in ('backoffLimit', 'podFailurePolicy'):
        assert job_template('jobset.yaml')['spec'][key] == job_template('runtime.yaml')['spec'][key]
    assert jobset_spec('jobset.yaml')['failurePolicy'] == jobset_spec('runtime.yaml')['failurePolicy']
    runtime = manifest('runtime.yaml')
    assert manifest('trainjob.yaml')['spec']['runtimeRef'] == dict(
        apiGroup='trainer.kubeflow.org', kind=runtime['kind'], name=runtime['metadata']['name'])


@pytest.mark.parametrize('name', RUNTIMES)
def test_time_limit_of_a_save_is_less_than_the_grace_period(name):
    seconds = int(environment(name, {})['TORCH_ELASTIC_SHUTDOWN_TIMEOUT'])
    assert 30 < seconds < pod_spec(name)['terminationGracePeriodSeconds']


@pytest.mark.parametrize('path', sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_users_change_at_most_ten_lines_at_the_top(path):
    lines = path.read_text().splitlines()
    begin = next(number for number, line in enumerate(lines) if not line.startswith('#'))
    places = [number - begin for number, line in enumerate(lines) if re.search(r'\byours$', line)]
    assert 0 < len(places) <= 10 and places[-1] < 45


def test_manifests_pass_yamllint():
    pytest.importorskip('yamllint')
    rules = '{extends: default, rules: {line-length: {max: 110}, document-start: disable}}'
    done = subprocess.run([sys.executable, '-m', 'yamllint', '--strict', '-d', rules, str(FOLDER)],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# --- two pods -----------------------------------------------------------------------------------------------

def environment(name, annotations):
    """The environment variables of a manifest's container, in a pod that has these annotations."""
    found = {}
    for variable in container(name)['env']:
        if 'value' in variable:
            found[variable['name']] = variable['value']
        elif annotations:
            path = variable['valueFrom']['fieldRef']['fieldPath']
            found[variable['name']] = annotations[re.fullmatch(r"metadata\.annotations\['(.+)'\]", path)[1]]
    return found


def variables_of_pod(name, rank, port, first_pod):
    """The environment variables of pod `rank` of two, with the given address and port of the first pod."""
    if name == 'runtime.yaml':  # Kubeflow Trainer sets torchrun's variables itself
        found = environment(name, {}) | dict(PET_NNODES='2', PET_NODE_RANK=str(rank),
                                             PET_MASTER_ADDR=first_pod)
    else:
        found = environment(name, {'jobset.sigs.k8s.io/replicatedjob-replicas': '2',
                                   'jobset.sigs.k8s.io/job-index': str(rank),
                                   'jobset.sigs.k8s.io/coordinator': first_pod})
    found = found | dict(PET_NPROC_PER_NODE='1', PET_MASTER_PORT=port, OMP_NUM_THREADS='1')
    del found['NCCL_SOCKET_IFNAME']
    return found


@contextlib.contextmanager
def two_pods(name, folder, *arguments, script=(), first_pod='localhost'):
    """A context with the processes of a manifest's two pods; `output()` is what they have printed.

    script: a file and its arguments, which each process runs instead of train.py.
    """
    python, *command = container(name)['command']
    assert python == 'python'
    if script:
        command[-1:] = script
    port, pods, logs = free_port(), [], []
    for rank in range(2):
        logs.append(folder / f'pod-{rank}-{time.monotonic_ns()}.log')
        with open(logs[-1], 'w') as file:
            pods.append(subprocess.Popen(
                [sys.executable, *map(str, command), *map(str, arguments)], cwd=ROOT, stdout=file,
                stderr=file, env=os.environ | variables_of_pod(name, rank, port, first_pod)))
    try:
        yield SimpleNamespace(pods=pods, output=lambda: '\n'.join(log.read_text() for log in logs))
    finally:
        for pod in pods:
            for pid in (*workers(pod), pod.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            pod.wait()


def workers(pod):
    """Process ids of the train.py processes of a pod."""
    children = pathlib.Path(f'/proc/{pod.pid}/task/{pod.pid}/children')
    with contextlib.suppress(OSError):
        return [int(pid) for pid in children.read_text().split()]
    return []


def caught_signals(process):
    """The signals that a process handles, as a mask of bits."""
    status = pathlib.Path(f'/proc/{process.pid}/status').read_text()
    return int(re.search(r'^SigCgt:\s*(\w+)$', status, re.M)[1], 16)


def wait_for(condition, run, seconds=600):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, run.output()
        assert all(pod.poll() is None for pod in run.pods), run.output()
        time.sleep(0.05)


def exit_codes(run, seconds=600):
    """Wait for both pods; returns their exit codes."""
    return [pod.wait(seconds) for pod in run.pods]


def action(name, codes, evicted=()):
    """JobSet's action by the manifest's rules for these exit codes. evicted: ranks of evicted pods."""
    def matches(rule, rank, code):
        if 'onExitCodes' in rule:
            assert rule['onExitCodes']['operator'] == 'In'
            return code in rule['onExitCodes']['values']
        return rule['onPodConditions'] == [dict(type='DisruptionTarget', status='True')] and rank in evicted

    job, policy = job_template(name)['spec'], jobset_spec(name)['failurePolicy']
    actions = set()
    for rank, code in enumerate(codes):
        rule = next((rule for rule in job['podFailurePolicy']['rules'] if matches(rule, rank, code)), None)
        assert rule is None or rule['action'] == 'FailJob'
        assert job['backoffLimit'] == 0
        reason = 'PodFailurePolicy' if rule else 'BackoffLimitExceeded'
        actions.add(next((rule['action'] for rule in policy['rules']
                          if reason in rule['onJobFailureReasons']), 'RestartJobSet'))
    assert len(actions) == 1, f'the action depends on which pod JobSet sees first: {actions}'
    return actions.pop()


def logged(out_dir):
    return max(read_run(out_dir).lines, default=0) if (out_dir / 'metrics.jsonl').exists() else 0


OPTIONS = ['--dropout=0.1', '--eval_interval=100', '--lr_decay_iters=1000', '--save_interval=10',
           '--comm_timeout=60', '--init_from=auto']


def survive(name, train, dataset, tmp_path, fault):
    """Train on two pods, call fault(run) at iteration 25 or later, and start the pods again.

    Asserts that the curve is that of a run without a fault. fault: returns the ranks of evicted pods.
    Returns exit codes, JobSet's action, the number of iterations computed twice, and the pods' output.
    """
    out_dir = tmp_path / 'out'
    common = [*TINY, *OPTIONS, f'--dataset={dataset}', f'--out_dir={out_dir}']
    slowly = [TESTS / 'with_fault.py', FAULTS / 'slow_iterations.py']
    with two_pods(name, tmp_path, *common, '--max_iters=1000', script=slowly) as run:
        wait_for(lambda: logged(out_dir) >= 25, run)
        began = time.monotonic()
        evicted = fault(run)
        codes = exit_codes(run)
        output = run.output()
    reached, resumed_from = logged(out_dir), checkpoint.find(out_dir)[0]
    assert checkpoint.damage(resumed_from) is None
    if evicted:
        assert saved_iterations(out_dir)[-1] == logged(out_dir)  # the save is complete
    lost = reached - int(resumed_from.rsplit('_', 1)[1])
    last = reached + 10
    count = len((out_dir / 'metrics.jsonl').read_text().splitlines())
    with two_pods(name, tmp_path, *common, f'--max_iters={last}') as run:
        wait_for(lambda: len((out_dir / 'metrics.jsonl').read_text().splitlines()) > count, run)
        seconds = time.monotonic() - began
        assert exit_codes(run) == [0, 0], run.output()
    unbroken = train(*OPTIONS, f'--max_iters={last}', nproc=2)
    found = read_run(out_dir)
    assert curve(found) == curve(unbroken)
    print(f'{fault.__name__}: {lost} iterations lost, {seconds:.1f} s until the next update')
    return SimpleNamespace(codes=codes, action=action(name, codes, evicted), lost=lost, output=output)


def test_evicted_pod_costs_nothing(train, dataset, tmp_path):
    """After SIGTERM to one pod, both save, exit with 143 and start again without using up a restart."""
    def evict(run):
        run.pods[1].terminate()
        return [1]

    run = survive('runtime.yaml', train, dataset, tmp_path, evict)
    assert run.codes == [STOPPED, STOPPED], run.output
    assert run.action == 'RestartJobSetAndIgnoreMaxRestarts' and run.lost == 0
    assert run.output.count('stopped by SIGTERM') == 1


def test_killed_process_ends_both_pods_which_start_again(train, dataset, tmp_path):
    def kill(run):
        os.kill(workers(run.pods[1])[0], signal.SIGKILL)
        return []

    run = survive('jobset.yaml', train, dataset, tmp_path, kill)
    assert run.codes == [1, 1] and run.action == 'RestartJobSet', run.output
    assert run.lost <= 20 + 2  # twice save_interval, if a save was in progress


def test_wrong_key_uses_up_a_restart(tmp_path):
    with two_pods('jobset.yaml', tmp_path, '--n_layers=3') as run:
        codes = exit_codes(run)
        assert action('jobset.yaml', codes) == 'RestartJobSet', run.output()
        assert "unknown key 'n_layers'" in run.output()


def test_pod_without_a_gpu_says_so():
    variables = dict(PET_NPROC_PER_NODE='gpu', CUDA_VISIBLE_DEVICES='')
    refused = run_script('launch/pod.py', 'train.py', env=variables, check=False)
    assert refused.returncode == 1
    assert refused.stderr.endswith(f'error: Cuda is not available. (pod {socket.gethostname()})\n')
    assert 'Traceback' not in refused.stderr


def test_signal_before_training_begins_ends_the_pod(tmp_path):
    """One pod is still importing torch; the other waits for the first pod, whose name is not known yet."""
    with two_pods('jobset.yaml', tmp_path, first_pod='kilogpt-node-0-0.invalid') as run:
        handles_sigterm = 1 << signal.SIGTERM - 1
        wait_for(lambda: caught_signals(run.pods[0]) & handles_sigterm, run)
        run.pods[0].terminate()
        assert run.pods[0].wait(120) == STOPPED, run.output()
        run.pods.pop(0)
        wait_for(lambda: 'addresses of (kilogpt-node-0-0.invalid' in run.output(), run)
        run.pods[0].terminate()
        assert run.pods[0].wait(120) == STOPPED, run.output()


def test_save_may_take_longer_than_torchrun_allows_by_itself(dataset, tmp_path):
    """A save of 35 seconds after SIGTERM ends with a whole checkpoint."""
    out_dir = tmp_path / 'out'
    script = [TESTS / 'with_fault.py', FAULTS / 'slow_save.py']
    with two_pods('jobset.yaml', tmp_path, *TINY, f'--dataset={dataset}', f'--out_dir={out_dir}',
                  '--eval_interval=100000', '--max_iters=100000', script=script) as run:
        wait_for(lambda: logged(out_dir) >= 3, run)
        for pod in run.pods:
            pod.terminate()
        assert exit_codes(run) == [STOPPED, STOPPED], run.output()
    path, = checkpoint.find(out_dir)
    assert checkpoint.damage(path) is None
