"""Write to the file STARTS where the training sequences begin, one line for each iteration."""
import json
import os

from data.loader import TokenLoader

train_starts = TokenLoader.train_starts


def recorded_train_starts(self, sequences):
    starts = train_starts(self, sequences)
    with open(os.environ['STARTS'], 'a') as file:
        print(json.dumps(starts.tolist()), file=file)
    return starts


TokenLoader.train_starts = recorded_train_starts
