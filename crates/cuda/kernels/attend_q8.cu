// Attention whose keys and values are kept as bytes with scales.
#define KEPT_Q8
#include "attend.cu"
