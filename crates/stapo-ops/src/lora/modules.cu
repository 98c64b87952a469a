// Most modules of a linear layer.
#define MODULES 3
// Parts of the depth of x A^T, each a chain of its own; they are added in order.
#define PARTS 4

// One TMA descriptor for each module.
struct alignas(64) Maps {
    TensorMap of[MODULES];
};

// The modules of a linear layer that have an adapter. `hidden` [T, pitch] has x A^T of module i from column hidden[i]
// on; the module's outputs are `outputs[i]` columns of y from start[i] on.
struct Modules {
    int n, rank, pitch, hidden[MODULES], start[MODULES], outputs[MODULES];
};
