"""Text from files: plain text, JSON lines, Parquet, and compressed ones. A file's ending says what it is.

A file is read in pieces, so that its size does not matter.
"""
import fnmatch
import glob
import io
import json
import os
import re

from data import hub
from data.storage import find_files as storage_files, is_url, version_of

DOCUMENTS = ('.jsonl', '.json', '.parquet')  # files of many documents; others are one text each
TEXTS = ('.txt', '.md')
# Tables and packed documents, of which no text is read, and what to do with them.
OTHERS = dict.fromkeys(('.csv', '.tsv', '.xlsx', '.xls'), 'make a .parquet or .jsonl file of it, as docs/data.md shows')
OTHERS |= dict.fromkeys(('.pdf', '.docx', '.doc', '.epub', '.zip', '.tar', '.arrow'), 'make .txt, .jsonl or '
                        '.parquet files of it')
COMPRESSED = ('.gz', '.zst', '.bz2', '.lz4')
PIECE = 2 ** 20  # characters of a text that are read at once
MOST_PROBLEMS = 10  # files that cannot be read and are named one by one


def form_of(path):
    """The ending of a file's name that says what it is: .jsonl for a.jsonl and for a.jsonl.gz."""
    root, ending = os.path.splitext(path.lower())
    return os.path.splitext(root)[1] if ending in COMPRESSED else ending


def find_files(patterns):
    """Return the files that comma-separated files, folders and globs mean, in that order.

    Of a folder, these are the files in it and in its subfolders whose endings are known.
    ValueError if one of the patterns means no file.
    """
    paths = []
    for pattern in patterns.split(','):
        if is_url(pattern):
            known = [url for url in storage_files(pattern) if form_of(url) in TEXTS + DOCUMENTS]
            if not known:
                raise ValueError(f'{pattern} has no file that ends in {", ".join(TEXTS + DOCUMENTS)}: set --input to files '
                                 'of these kinds')
            paths += known
            continue
        pattern = os.path.expanduser(pattern)
        is_folder = os.path.isdir(pattern)
        if names_dataset(pattern):
            paths += fetch_dataset(pattern)
            continue
        matches = os.path.join(glob.escape(pattern), '**') if is_folder else pattern
        files = sorted(filter(os.path.isfile, glob.glob(matches, recursive=True)))
        known = [path for path in files if form_of(path) in TEXTS + DOCUMENTS] if is_folder else files
        if is_folder and not known:
            raise ValueError(f'{pattern} has no file that ends in {", ".join(TEXTS + DOCUMENTS)} (or one of '
                             f"these and {', '.join(COMPRESSED)}): for other files of text set --input to a "
                             f"glob such as '{os.path.join(pattern, '*')}'")
        if not known:
            raise ValueError(f'there is no file {pattern!r}: --input must be files, folders, globs or names of '
                             'datasets on the hub (org/name), separated by commas')
        if len(known) < len(files):
            endings = {os.path.splitext(path)[1] or 'none' for path in set(files) - set(known)}
            print(f'left out {len(files) - len(known)} files in {pattern} with other endings: '
                  f'{", ".join(sorted(endings))}')
        paths += known
    return list(dict.fromkeys(paths))


def names_dataset(pattern):
    """Whether a part of --input is on the hub: org/name, org/name/FOLDER or org/name/GLOB, and not a file here."""
    place = hub.parse(pattern, 'dataset')
    return (place is not None and not glob.glob(pattern)
            and form_of(place.repository) not in (*DOCUMENTS, *TEXTS, *OTHERS))


def fetch_dataset(name):
    """The files on this machine of a dataset on the hub, downloaded if necessary: those of its training split."""
    place, chosen = hub.parse(name, 'dataset'), []

    def choose(names):
        chosen[:] = _choose_data(place, names)
        return chosen

    folder = hub.fetch(place, choose)
    print(f'{name}: {len(chosen)} file(s), {", ".join(dict.fromkeys(map(_set_of, chosen)))}')
    return [os.path.join(folder, name) for name in chosen]


def _choose_data(place, names):
    """The files that a Place means of the names in a repository; those of other splits only if a glob says so."""
    files = [name for name in names if form_of(name) in DOCUMENTS + TEXTS
             and os.path.basename(name) not in ('README.md', 'dataset_infos.json', 'dataset_info.json', 'state.json')]
    if place.path and fnmatch.filter(files, place.path):
        return fnmatch.filter(files, place.path)
    files = [name for name in files if name.startswith(place.path and f'{place.path.rstrip("/")}/')]
    if not files:
        raise ValueError(f'has no {place.path or "file"} that ends in {", ".join(DOCUMENTS + TEXTS)}')
    form = next(form for form in ('.parquet', *DOCUMENTS, *TEXTS) if form in map(form_of, files))
    files = [name for name in files if form_of(name) == form]
    others = re.compile('(^|[^a-z])(valid|validation|val|dev|test)([^a-z]|$)')
    files = ([name for name in files if re.search('(^|[^a-z])train', name.lower())]
             or [name for name in files if not others.search(name.lower())] or files)
    sets = list(dict.fromkeys(map(_set_of, files)))
    if len(sets) > 1:
        raise ValueError(f'has no single set of texts, but {len(sets)} ({", ".join(sets[:MOST_PROBLEMS])}): name one, '
                         f'such as --input={place.repository}/{sets[0]}')
    return files


def _set_of(name):
    """The set that a file belongs to, as a glob: shards of one have numbers, other files of a folder one ending."""
    folder, file = os.path.split(name)
    pattern, count = re.subn(r'-\d+-of-\d+', '-*', file)
    return os.path.join(folder, pattern if count else f'*{form_of(file)}')


def file_versions(paths):
    """Return [path, size in bytes, modification time] of each file, to detect changed files."""
    return [[path, *version_of(path)] if is_url(path) else
            [os.path.abspath(path), os.path.getsize(path), os.path.getmtime(path)] for path in paths]


def measure(paths, field='text'):
    """Read files to their end; returns {path: number of characters} of those that can be read.

    Prints why the others cannot be read. ValueError if all of them cannot.
    """
    from tqdm import tqdm
    sizes, problems = {}, []
    with tqdm(desc='reading', unit='char', unit_scale=True, disable=None) as bar:
        for path in paths:
            size = 0
            try:
                for text, _ in read_pieces(path, field):
                    size += len(text)
                    bar.update(len(text))
                sizes[path] = size
            except ValueError as error:
                problems.append(f'{error}')
    if not sizes:
        raise ValueError(problems[0])
    for problem in problems[:MOST_PROBLEMS]:
        print(f'left out: {problem}')
    if len(problems) > MOST_PROBLEMS:
        print(f'left out: {len(problems) - MOST_PROBLEMS} more files')
    return sizes


def read_texts(paths, field='text'):
    """Yield all text of files that `measure` has found readable, in pieces."""
    for path in paths:
        for text, _ in read_pieces(path, field):
            yield text


def read_pieces(path, field='text'):
    """Yield (text, ends_document): a file's documents, or for a file of text its pieces with line ends \n.

    field: the field or column with the text of a document. A document where it is null is left out.
    ValueError if the file cannot be read, ImportError without the library that reads it.
    """
    try:
        if form_of(path) in DOCUMENTS:
            for row in _read_parquet(path, field) if form_of(path) == '.parquet' else _read_json(path):
                if not isinstance(row, dict) or field not in row:
                    fields = ', '.join(row) if isinstance(row, dict) else repr(row)[:20]
                    raise ValueError(f'{path} has no {field!r} field, only {fields}: set --text_field to the '
                                     'field that holds the text')
                if not isinstance(row[field], str | None):
                    raise ValueError(f'{path} has {row[field]!r:.20} as its {field!r} field, which must be a '
                                     'string: set --text_field to the field that holds the text')
                if row[field] is not None:
                    yield row[field], True
            return
        _refuse_others(path)
        with _open_text(path) as file:
            while text := file.read(PIECE):
                yield text, False
    except UnicodeDecodeError as error:
        before = error.object[:error.start].decode(errors='replace')[-20:]
        what = f'the byte 0x{error.object[error.start]:02x}' + (f' after {before!r}' if before else '')
        raise ValueError(f'{path} is not UTF-8 text: it has {what}; convert it, for example with '
                         'iconv') from None
    except OSError as error:
        raise ValueError(f'{path} cannot be read: {error}') from None


def read_rows(path):
    """Yield the rows of a file of documents, with all fields, as dicts. ValueError if it cannot be read."""
    try:
        if form_of(path) not in DOCUMENTS:
            _refuse_others(path)
            raise ValueError(f'{path} must end in {", ".join(DOCUMENTS)}')
        for row in _read_parquet(path) if form_of(path) == '.parquet' else _read_json(path):
            if not isinstance(row, dict):
                raise ValueError(f'{path} has the row {repr(row)[:40]}, which must be an object')
            yield row
    except UnicodeDecodeError as error:
        raise ValueError(f'{path} is not UTF-8 text ({error}): convert it, for example with iconv') from None
    except OSError as error:
        raise ValueError(f'{path} cannot be read: {error}') from None


def _refuse_others(path):
    if form_of(path) in OTHERS:
        raise ValueError(f'{path} ends in {form_of(path)}, which is not read as text: {OTHERS[form_of(path)]}')


def _open_text(path):
    encoding = 'utf-8-sig'  # many books start with a byte order mark
    if not path.lower().endswith(COMPRESSED):
        return open(path, encoding=encoding)
    return io.TextIOWrapper(_import_pyarrow(path).input_stream(path), encoding=encoding)


def _import_pyarrow(path):
    try:
        import pyarrow.parquet
    except ImportError:
        raise ImportError(f'{path} needs pyarrow to be read: pip install pyarrow') from None
    return pyarrow


def _read_json(path):
    """Yield the rows of JSON lines, of which one may also be a list of rows; or of one value over several lines."""
    with _open_text(path) as file:
        for number, line in enumerate(file, 1):
            try:
                rows = [] if line.isspace() else json.loads(line)
            except ValueError as error:
                if number > 1 or line.strip() not in ('[', '{', '[{'):
                    raise ValueError(f'{path} has no JSON in line {number}: {error}') from None
                rows = _parse_whole(path, line + file.read())
            yield from rows if isinstance(rows, list) else [rows]


def _parse_whole(path, text):
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f'{path} has no JSON: {error}') from None


def _without_nulls(value):
    """A value of a column without the entries that are null.

    Arrow gives each struct all entries of its column, so that an entry that a row did not have is null.
    """
    if isinstance(value, dict):
        return {name: _without_nulls(entry) for name, entry in value.items() if entry is not None}
    return list(map(_without_nulls, value)) if isinstance(value, list) else value


def _read_parquet(path, field=None):
    """Yield rows, of which only the column `field` is read; without such a column, one row of all columns.

    field: None = read all columns.
    """
    pyarrow = _import_pyarrow(path)
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if field is not None and field not in names:
                yield dict.fromkeys(names)
                return
            for batch in file.iter_batches(1024, columns=field and [field]):
                for row in batch.to_pylist():
                    yield {name: _without_nulls(value) for name, value in row.items()}
    except pyarrow.ArrowException as error:
        raise OSError(error) from None
