// Most modules of a linear layer.
#define MODULES 3
// Parts of the depth of x A^T, each a chain of its own; they are added in order.
#define PARTS 4

// One TMA descriptor for each module.
struct alignas(64) Maps {
    TensorMap of[MODULES];
};

// The modules of a linear layer that have an adapter. `hidden` [T, pitch] has x A^T of module i from column hidden[i]
// on, where each module takes `apart` columns, the rank rounded up to 16, the depth of a matrix instruction.
// The module's outputs are `outputs[i]` columns of y from start[i] on. `columns` of hidden take part in a product: the
// rank, or all of them.
struct Modules {
    int n, rank, apart, columns, pitch, hidden[MODULES], start[MODULES], outputs[MODULES];
};
