"""Tensor parallelism: the matrices of each layer are cut over the ranks of a group.

linear.py   column and row layers           vocab.py               embedding, logits and loss
sequence.py norms and dropout, of a part    collective_matmul.py   messages beside the products
            of the sequence each
"""
