"""The cache of the hub cannot be written. Root may write everywhere, so that the system's answer is stood in for."""
from data import hub

hub._is_writable = lambda folder: False
