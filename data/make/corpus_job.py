"""The command data/corpus/prepare.py: the steps of data/make/pipeline.py, one after the other, and what they wrote."""
import hashlib
import json
import math
import os
import pathlib
import shutil

from data.datasets import places_of
from data.make.pipeline import (
    DIGESTS_AT_ONCE, find_copies, mark_copies, processes_engine, ray_engine, run_tasks, tokenize, write_shard)
from data.make.prepare import check_unused, publish
from data.make.readers import MOST_PROBLEMS, file_versions, find_files
from data.storage import write_atomically
from data.tokens import copy_tokenizer, portable

SHARD_BYTES = 2 ** 28  # of input files for a train shard


def prepare_corpus(input, text_field, out, encoder, filter, deduplicate, shuffle, val_fraction, n_shards, seed,
                   num_proc, ray, overwrite=False):
    """Write a dataset. The arguments are the keys of data/corpus/prepare.py, of which encoder is the tokenizer itself.

    ValueError if one is wrong.
    """
    if not input:
        raise ValueError('no files given: set --input, such as --input=documents')
    if not 0 <= val_fraction < 1:
        raise ValueError(f'val_fraction is {val_fraction}, but must be at least 0 and below 1')
    if n_shards < 0 or num_proc < (0 if ray else 1):
        raise ValueError(f'n_shards is {n_shards} and num_proc is {num_proc}: give positive numbers')
    folder = pathlib.Path(places_of(out)[0])
    check_unused(out, encoder, input, overwrite)
    partial = folder / '.partial'
    versions = file_versions(find_files(input))
    meta = encoder.meta() | ({} if encoder.gains_from_processes else dict(tokenizer='gpt2-gigatoken'))
    job = dict(files=[path for path, *_ in versions], field=text_field, dtype=encoder.meta()['dtype'],
               tokenizer=meta | (dict(folder=str(partial / 'tokenizer')) if 'folder' in meta else {}),
               filter=os.path.abspath(filter) if filter else '', deduplicate=deduplicate, shuffle=shuffle,
               val_fraction=val_fraction, seed=seed, folder=str(partial))
    job |= _shards_of([size for _, size, _ in versions], n_shards)
    recipe = job | dict(versions=versions, tokenizer='', encoder=encoder.meta() | dict(folder=''),
                        filter_digest=hashlib.sha256(pathlib.Path(filter).read_bytes()).hexdigest() if filter else '')
    _continue_or_clear(partial, json.loads(json.dumps(recipe)))
    copy_tokenizer(meta, partial / 'tokenizer')  # other machines may not have the folder that it is in
    engine = ray_engine(ray, num_proc) if ray else processes_engine(num_proc)
    counts, copies, written = _run(job, engine)
    _publish(job, folder, encoder, input, versions, counts, copies, written)


def _shards_of(sizes, n_shards):
    """{'shards': number of train shards, 'shard_of_file': [shard of each file] if documents are not shuffled}."""
    total = max(1, sum(sizes))
    n_shards = n_shards or max(1, round(total / SHARD_BYTES))
    before, shard_of_file = 0, []
    for size in sizes:
        shard_of_file.append(before * n_shards // total)
        before += size
    return dict(shards=n_shards, shard_of_file=shard_of_file)


def _continue_or_clear(partial, recipe):
    """Keep what an interrupted command with the same recipe has written; otherwise clear the folder."""
    path = partial / 'recipe.json'
    if path.exists() and json.loads(path.read_text()) == recipe:
        print('continuing where an earlier command was interrupted')
        for result in partial.glob('write_shard_*.json'):
            if not (partial / f'shard_{result.stem[-6:]}.bin').exists():  # it was interrupted at the very end
                result.unlink()
        return
    shutil.rmtree(partial, ignore_errors=True)
    with write_atomically(path) as file:
        file.write(json.dumps(recipe).encode())


def _run(job, engine):
    """(counts of each input file, number of copies, {shard: counts}) after all steps."""
    counts = run_tasks(tokenize, job, range(len(job['files'])), engine)
    problems = [count['problem'] for count in counts if count['problem']]
    for problem in problems[:MOST_PROBLEMS]:
        print(f'left out: {problem}')
    if len(problems) > MOST_PROBLEMS:
        print(f'left out: {len(problems) - MOST_PROBLEMS} more files')
    if len(problems) == len(counts):
        raise ValueError(problems[0])
    job['documents'] = [count['documents'] for count in counts]
    job['digest_parts'] = math.ceil(max(1, sum(job['documents'])) / DIGESTS_AT_ONCE)
    copies = 0
    if job['deduplicate']:
        found = run_tasks(find_copies, job, range(job['digest_parts']), engine)
        copies = sum(part['copies'] for part in found)
        run_tasks(mark_copies, job, range(len(job['files'])), engine)
    first = 0 if job['val_fraction'] else 1
    shards = range(first, 1 + job['shards'])
    return counts, copies, dict(zip(shards, run_tasks(write_shard, job, shards, engine)))


def _publish(job, folder, encoder, origin, versions, counts, copies, written):
    """Give the shards their names, write meta.json and manifest.json, and say what there is."""
    partial, files, names = folder / '.partial', {}, {}
    for shard, result in written.items():
        if result['tokens']:
            name = f'train_{len(files) - ("val.bin" in files):06d}.bin' if shard else 'val.bin'
            files[name], names[name] = result, f'shard_{shard:06d}.bin'
    has_val = 'val.bin' in files
    if len(files) == has_val or job['val_fraction'] and not has_val:
        split = 'train' if len(files) == has_val else 'val'
        documents, filtered = (sum(count[key] for count in counts) for key in ('documents', 'filtered'))
        raise ValueError(f'{origin} has no document for the {split} split: of {documents:,}, {filtered:,} are empty or '
                         f'left out by the filter, and {copies:,} are copies. Use more documents, or change '
                         f'val_fraction (now {job["val_fraction"]:g}) or filter')
    separator = {} if encoder.eot is None else dict(separator=encoder.eot)
    meta = portable(encoder.meta()) | separator | dict(input=origin)
    totals = dict(documents=sum(count['documents'] for count in counts),
                  filtered=sum(count['filtered'] for count in counts), copies=copies,
                  kept=sum(result['documents'] for result in files.values()),
                  tokens=sum(result['tokens'] for result in files.values()))
    keys = ('field', 'filter', 'deduplicate', 'shuffle', 'val_fraction', 'seed', 'shards')
    manifest = dict(totals=totals, files=files, tokenizer=portable(encoder.meta()), keys={key: job[key] for key in keys},
                    input=[dict(path=path, bytes=size, **count) for (path, size, _), count in zip(versions, counts)])
    meta['tokens'] = {name: result['tokens'] for name, result in files.items()}
    publish(partial, folder, meta, encoder, {'manifest.json': json.dumps(manifest, indent=1)}, names)
    print(f'{totals["documents"]:,} documents: {totals["filtered"]:,} left out by the filter or empty, {copies:,} '
          f'copies, {totals["kept"]:,} kept, with {totals["tokens"]:,} tokens')
    for name, result in files.items():
        print(f'{name} has {result["tokens"]:,} tokens of {result["documents"]:,} documents')
    print(f'wrote {folder}')
