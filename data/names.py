"""The names of the datasets that are prepared on this machine."""
import difflib
import glob
import os


def prepared_datasets():
    """The names of datasets that have token files, in data/ and in the current directory, sorted."""
    places = os.path.dirname(os.path.abspath(__file__)), os.getcwd()
    paths = [path for place in places for path in glob.glob(os.path.join(glob.escape(place), '*', '*.bin'))]
    return sorted({os.path.basename(os.path.dirname(path)) for path in paths})


def like_prepared(dataset):
    """The end of a sentence about a dataset that is not there: names of those that are, and are like it."""
    close = difflib.get_close_matches(os.path.basename(dataset), prepared_datasets())
    return f'. Or did you mean {" or ".join(close)}?' if close else ''
