"""data/tasks/make.py writes a task of anyone's text, which kilogpt.evaluate reads."""
import json

from helpers import run_script

from kilogpt.evaluate.tasks import read_task

WORDS = [f'word{i}' for i in range(400)]


def make(folder, *arguments, **options):
    (folder / 'book.txt').write_text('\n'.join(WORDS))
    return run_script('data/tasks/make.py', f'--input={folder}/book.txt', f'--out={folder}/questions.jsonl',
                      *arguments, **options)


def test_right_choice_continues_the_passage_and_the_others_are_of_other_passages(tmp_path):
    make(tmp_path, '--count=12', '--context_words=20', '--choice_words=5')
    questions = read_task(str(tmp_path / 'questions.jsonl')).questions
    assert len(questions) == 12 and {question.answer for question in questions} == {0, 1, 2, 3}
    for question in questions:
        choices = [choice for _, choice in question.pairs]
        whole = question.pairs[0][0] + choices[question.answer]
        assert whole in ' '.join(WORDS) and len(whole.split()) == 25
        assert len(set(choices)) == 4 and all(choice in ' '.join(WORDS) for choice in choices)


def test_same_seed_gives_the_same_questions(tmp_path):
    texts = []
    for seed in (0, 0, 1):
        make(tmp_path, '--count=5', f'--seed={seed}')
        texts.append((tmp_path / 'questions.jsonl').read_text())
    assert texts[0] == texts[1] != texts[2]
    assert json.loads(texts[0].splitlines()[0]) == {'settings': {'prompt': '{question}'}}


def test_too_little_text_is_one_sentence(tmp_path):
    done = make(tmp_path, '--count=6', check=False)
    assert done.returncode == 1
    assert 'has 5 passages of 72 words, but 6 are needed: set count to less, or give more' in done.stderr
