/* The cells of LSTM and GRU, for which torch wants kernels of an accelerator's own.

   They are made of operators that autograd knows, so they need no backward. */

#include <ATen/ATen.h>
#include <torch/library.h>

namespace dev {
namespace {

at::Tensor with_bias(const at::Tensor &gates, const std::optional<at::Tensor> &bias) {
    return bias && bias->defined() ? gates + *bias : gates;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor &input, const at::Tensor &hidden, const at::Tensor &cx,
    const std::optional<at::Tensor> &input_bias, const std::optional<at::Tensor> &hidden_bias) {
    auto gates = (with_bias(hidden, hidden_bias) + with_bias(input, input_bias)).chunk(4, 1);
    auto cy = gates[1].sigmoid() * cx + gates[0].sigmoid() * gates[2].tanh();
    return {gates[3].sigmoid() * cy.tanh(), cy, at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(
    const at::Tensor &input, const at::Tensor &hidden, const at::Tensor &hx,
    const std::optional<at::Tensor> &input_bias, const std::optional<at::Tensor> &hidden_bias) {
    auto in = with_bias(input, input_bias).chunk(3, 1);
    auto from = with_bias(hidden, hidden_bias).chunk(3, 1);
    auto reset = (from[0] + in[0]).sigmoid(), kept = (from[1] + in[1]).sigmoid();
    auto fresh = (in[2] + from[2] * reset).tanh();
    return {(hx - fresh) * kept + fresh, at::Tensor()};
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
    m.impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
    m.impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
}

/* In inference mode, tensors know nothing of autograd. */
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
    m.impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
}

} // namespace
} // namespace dev
