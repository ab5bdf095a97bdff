"""What is measured, a script a question: ``python -m benchmarks.NAME`` from a clone.

``speed`` times the operator and the training step, each beside a reference in the same run;
``baselines`` trains by the methods of other libraries.
"""
