    // The rows of the weight that tiles are of: all of this part.
    let begin = 0u;
    let rows = params[PART_ROWS >> 2u][PART_ROWS & 3u];
