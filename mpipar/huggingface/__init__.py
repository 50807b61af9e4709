"""Weights in the folders of Hugging Face's transformers, read and written: GPT-2 and Llama.

names      which tensor of a folder is which parameter
settings   config.json and ModelConfig
weights    the tensors of a folder: mapped, never loaded as a whole; and written
convert    a folder to a checkpoint and back
initial    the weights that a run begins with
"""
