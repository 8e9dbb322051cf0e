document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-copy]");
  if (!button) return;
  const line = button.parentElement.querySelector("code");
  getSelection().selectAllChildren(line);
  const copied = navigator.clipboard ? navigator.clipboard.writeText(line.textContent) : Promise.reject();
  copied.catch(() => document.execCommand("copy")).then(() => { button.textContent = "copied"; });
});
