// Errors are values: a function that can fail returns an Error, empty when all went well.
#pragma once

#include <string>
#include <utility>

namespace pdnode {

class [[nodiscard]] Error {
 public:
  Error() = default;
  explicit Error(std::string text) : text_(std::move(text)) {}
  explicit operator bool() const { return !text_.empty(); }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

}  // namespace pdnode
