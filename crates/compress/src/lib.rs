//! A GGUF in, a GGUF out: what activations say about weights, and what is made of the weights with
//! that. It must not know text, tokens, or any particular backend.

#![forbid(unsafe_code)]

pub mod imatrix;
