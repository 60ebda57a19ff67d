//! Where tensors to convert come from. It must not know what becomes of them.

use std::borrow::Cow;
use std::io;

use bodkin_gguf::{File, Metadata, Tensor};

/// The tensors to convert, and the data of each: a file, or what another format's converter makes.
pub trait Source {
    /// The metadata, of which the architecture and its sizes are read.
    fn metadata(&self) -> &Metadata;

    /// All tensors in the order of the new file.
    fn tensors(&self) -> &[Tensor];

    /// The bytes of a tensor, each of which is read once.
    ///
    /// # Errors
    /// If they cannot be read.
    fn read(&self, tensor: &Tensor) -> io::Result<Cow<'_, [u8]>>;

    /// Releases the memory of a tensor that was read.
    fn release(&self, tensor: &Tensor);
}

impl Source for File {
    fn metadata(&self) -> &Metadata {
        self.metadata()
    }

    fn tensors(&self) -> &[Tensor] {
        self.tensors()
    }

    fn read(&self, tensor: &Tensor) -> io::Result<Cow<'_, [u8]>> {
        Ok(self.read(tensor))
    }

    fn release(&self, tensor: &Tensor) {
        self.release(tensor);
    }
}
