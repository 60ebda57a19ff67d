// Attention whose keys and values are kept in f32.
#define KEPT_F32
#include "attend.cu"
