"""Rewards of texts, by a file of the user's or a task of reasoning-gym in a process of its own, with a time limit."""
import json
import os
import select
import subprocess
import sys

START_SECONDS = 60  # in which the file has to be imported


class Rewards:
    """Scores texts by reward(row, text) of a Python file, or by reasoning_gym:TASK.

    The process is started when the first text comes.
    seconds: how long a reward may take, after which the process is ended, and a new one started.
    """

    def __init__(self, path, seconds):
        self.path, self.seconds, self.process = path, seconds, None

    def score(self, row, text):
        """(reward, None), or (None, what went wrong). ValueError if the file cannot be run."""
        if self.process is None:
            self._start()
        try:
            self.process.stdin.write(json.dumps([row, text]).encode() + b'\n')
            self.process.stdin.flush()
            answer = self._read(self.seconds)
        except OSError:  # its end has come between two texts
            answer = None
        if answer is None:
            is_alive = self.process.poll() is None
            self.close()
            return None, f'it took more than {self.seconds}s' if is_alive else 'its process ended'
        return answer.get('reward'), answer.get('error')

    def _start(self):
        command = [sys.executable, os.path.join(os.path.dirname(__file__), 'reward_process.py'), self.path]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        answer = self._read(START_SECONDS) or dict(error=f'it was not imported within {START_SECONDS}s')
        if 'error' in answer:
            self.close()
            raise ValueError(f'rl_reward is {self.path!r}, which does not give rewards: {answer["error"]}')

    def _read(self, seconds):
        """The next answer; None if the process ends, or does not answer within that many seconds."""
        line, file = b'', self.process.stdout.fileno()
        while not line.endswith(b'\n'):
            if not select.select([file], [], [], seconds)[0]:
                return None
            part = os.read(file, 2 ** 16)
            if not part:
                self.process.wait(1)
                return None
            line += part
        return json.loads(line)

    def close(self):
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None
