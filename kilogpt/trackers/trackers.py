"""Weights & Biases, trackio and TensorBoard, which show the values of a run's log."""
import os
import sys

# Seconds for which a run waits for the server of Weights & Biases at its start and at its end. wandb waits for
# 90 seconds, and at the end for ever, unless WANDB_INIT_TIMEOUT and WANDB_FINISH_TIMEOUT are set.
WANDB_LIMITS = dict(init_timeout=30.0, finish_timeout=60.0)


class RefusedRun(ValueError):
    """What the user has to mend before the run starts: a package that is missing, an account."""


class Trackers:
    """The trackers of a run. One that raises an error is left out from then on, with one warning.

    out_dir: the folder of the run. config: its keys. wandb_id: of the run that continues, or None. iteration: at which
    the run starts or resumes. island: of several, the first alone is shown outside its folder.
    RefusedRun if a package is not installed, or if wandb refuses the run, for lack of an account, for example.
    """

    def __init__(self, out_dir, config, wandb_id=None, iteration=0, island=0):
        self.wandb_id = wandb_id  # under which wandb continues this run
        self.opened = []
        for kind in (TensorBoard,) if island else (Wandb, Trackio, TensorBoard):
            if config.get(kind.key) and not (kind is TensorBoard and config.get('eval_only')):
                self._try(kind.name, lambda: self.opened.append(kind(out_dir, config, wandb_id, iteration)))
        for tracker in self.opened:
            self.wandb_id = getattr(tracker, 'id', self.wandb_id)

    def log(self, line):
        """Show a line of the log, {name: value} with the key `iter`."""
        self._tell('log', line)

    def add_samples(self, samples, iteration):
        """Show samples of text, dicts of `prompt` and `text`."""
        self._tell('add_samples', samples, iteration)

    def close(self):
        self._tell('close')

    def _tell(self, method, *arguments):
        for tracker in list(self.opened):
            if not self._try(tracker.name, lambda: getattr(tracker, method)(*arguments)):
                self.opened.remove(tracker)

    def _try(self, name, action):
        """Whether an action on a tracker succeeds; if not, say so."""
        try:
            action()
        except RefusedRun:
            raise
        except Exception as error:  # of any kind: the tracker's process has died, its disk is full, ...
            reason = ' '.join(f'{type(error).__name__}: {error}'.split())
            print(f'warning: {name} has failed ({reason}). Training continues without it', file=sys.stderr, flush=True)
            return False
        return True


class Wandb:
    """Weights & Biases. A resumed run continues the same run there."""
    key, name = 'wandb_log', 'wandb'

    def __init__(self, out_dir, config, wandb_id, iteration):
        self.run = start_wandb(dir=out_dir, project=config['wandb_project'], name=config['wandb_run_name'],
                               config=config, id=wandb_id)
        self.id = self.run.id
        self.step = 0

    def log(self, line):
        self.step = max(self.step, line['iter'])  # wandb drops lines of earlier steps
        self.run.log(line, step=self.step)

    def add_samples(self, samples, iteration):
        import wandb
        rows = [[sample['prompt'], sample['text']] for sample in samples]
        self.log(dict(iter=iteration, samples=wandb.Table(columns=['prompt', 'text'], data=rows)))

    def close(self):
        self.run.finish()


def start_wandb(**arguments):
    """The run that logs to Weights & Biases; an offline one, with a warning, if the server does not answer.

    arguments: those of wandb.init. RefusedRun if wandb is not installed, or refuses the run.
    """
    try:
        import wandb
    except ImportError:
        raise RefusedRun('wandb_log=True needs wandb: pip install wandb, or set --wandb_log=False') from None
    limits = {key: seconds for key, seconds in WANDB_LIMITS.items()
              if key in wandb.Settings.model_fields and f'WANDB_{key.upper()}' not in os.environ}
    try:
        try:
            return wandb.init(resume='allow', settings=limits, **arguments)
        except wandb.errors.CommError as error:
            if isinstance(error, wandb.errors.AuthenticationError) or 'returned error' in str(error):
                raise
            reason = ' '.join(str(error).split())
            print(f'warning: Weights & Biases does not answer ({reason}). Training continues, and logs to '
                  f'{os.path.join(arguments["dir"], "wandb")}, from where `wandb sync` uploads it',
                  file=sys.stderr, flush=True)
            return wandb.init(resume='allow', settings=limits, mode='offline', **arguments)
    except wandb.Error as error:  # without an account, or with a project that is not the user's
        raise RefusedRun(f'wandb_log=True, but {" ".join(str(error).split())} '
                         '(or set WANDB_MODE=offline, or --wandb_log=False)') from None


class Trackio:
    """trackio, which has wandb's interface and keeps its values in a database of this machine (TRACKIO_DIR)."""
    key, name = 'trackio', 'trackio'

    def __init__(self, out_dir, config, wandb_id, iteration):
        try:
            import trackio
        except ImportError:
            raise RefusedRun('trackio=True needs trackio: pip install trackio, or set --trackio=False') from None
        # A resumed run continues the newest of this name; others may have had the name before.
        self.run = trackio.init(project=config['wandb_project'], name=config['wandb_run_name'], config=config,
                                resume='allow' if iteration else 'never', embed=False)

    def log(self, line):
        self.run.log(numbers_of(line), step=line['iter'])

    def add_samples(self, samples, iteration):
        import trackio
        text = '\n\n'.join(sample['prompt'] + sample['text'] for sample in samples)
        self.run.log(dict(samples=trackio.Markdown(text)), step=iteration)

    def close(self):
        self.run.finish()


class TensorBoard:
    """out_dir/tensorboard."""
    key, name = 'tensorboard', 'TensorBoard'

    def __init__(self, out_dir, config, wandb_id, iteration):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise RefusedRun('tensorboard=True needs TensorBoard: pip install tensorboard, '
                             'or set --tensorboard=False') from None
        # After a resume, the files of the earlier part of the run hold everything up to this iteration.
        self.begin = iteration + 1 if iteration else 0
        self.writer = SummaryWriter(os.path.join(out_dir, 'tensorboard'), purge_step=self.begin)

    def log(self, line):
        if line['iter'] >= self.begin:
            for key, value in numbers_of(line).items():
                self.writer.add_scalar(key, value, line['iter'])
            self.writer.flush()

    def add_samples(self, samples, iteration):
        for number, sample in enumerate(samples):
            if iteration >= self.begin:
                self.writer.add_text(f'sample/{number}', sample['prompt'] + sample['text'], iteration)

    def close(self):
        self.writer.close()


def numbers_of(line):
    """{name: number} of a line of the log, without its iteration."""
    return {key: value for key, value in line.items() if key != 'iter' and isinstance(value, (int, float))}
