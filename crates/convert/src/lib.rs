//! Safetensors and tokenizer files in, a GGUF out, with the names, keys and layouts that
//! llama.cpp's converter gives. A model is a folder, a zip file or a wheel, which is read in place
//! and tensor by tensor. Its files are hostile: code in them is never run, and no file is read
//! that is not one of the model's. This crate must not know devices, terminals or where models
//! come from.

#![forbid(unsafe_code)]

mod card;
mod change;
mod config;
mod error;
mod family;
mod general;
mod model;
mod modules;
mod repository;
mod safetensors;
mod source;
mod tensors;
mod tokenizer;

pub use error::{Error, Result};
pub use model::{Model, Options};
