// A device guard that does nothing, for a device type that this build of torch has no guard for.
//
// torch asks for the guard of a tensor's device before it indexes, inverts or copies the tensor, a
// fake one included, and a build without that backend has none. FakeTensorMode installs torch's own
// no-op guard on CUDA builds without a GPU (c10::impl::ensureCUDADeviceGuardSet); this is the same
// for the builds and device types that it leaves out.

#include <c10/core/Device.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <cstddef>
#include <utility>

namespace {

using Guard = c10::impl::DeviceGuardImplInterface;

template <std::size_t... I>
std::array<const Guard*, sizeof...(I)> make_guards(std::index_sequence<I...>) {
  // Leaked on purpose: guards have no destructor, because the registry does not own them.
  return {new c10::impl::NoOpDeviceGuardImpl<static_cast<c10::DeviceType>(I)>()...};
}

constexpr auto kTypes = static_cast<std::size_t>(c10::DeviceType::COMPILE_TIME_MAX_DEVICE_TYPES);

const Guard* guard_of(std::size_t type) {
  static const auto guards = make_guards(std::make_index_sequence<kTypes>());
  return guards[type];
}

std::size_t type_of(const char* name) {
  return static_cast<std::size_t>(c10::Device(name).type());
}

}  // namespace

// 1 if the guard was installed, 0 if torch has one, -1 if there is no such device type.
extern "C" int fp8pass_install_guard(const char* name) try {
  const std::size_t type = type_of(name);
  const Guard* none = nullptr;
  auto& slot = c10::impl::device_guard_impl_registry.at(type);
  return slot.compare_exchange_strong(none, guard_of(type)) ? 1 : 0;
} catch (...) {
  return -1;
}

// Takes it away again; 1 if it was there.
extern "C" int fp8pass_remove_guard(const char* name) try {
  const std::size_t type = type_of(name);
  const Guard* ours = guard_of(type);
  auto& slot = c10::impl::device_guard_impl_registry.at(type);
  return slot.compare_exchange_strong(ours, nullptr) ? 1 : 0;
} catch (...) {
  return -1;
}
