//! Every operation, format and odd shape against the reference.
