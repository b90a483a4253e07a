"""Write what each process computes to the folder GRADIENTS, as kilogpt.prove does.

The run computes in float64, unless GRADIENTS_IN is float32.
"""
import os

from kilogpt.prove import observer

observer.install(os.environ['GRADIENTS'], in_float64=os.environ.get('GRADIENTS_IN') != 'float32')
