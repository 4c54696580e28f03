"use strict";
document.addEventListener("click", async event => {
  const button = event.target.closest("button.copy");
  if (!button) return;
  const code = button.parentElement.querySelector("code"), said = button.querySelector("span");
  try { await navigator.clipboard.writeText(code.textContent); said.textContent = "Copied"; }
  catch { getSelection().selectAllChildren(code); said.textContent = document.execCommand("copy") ? "Copied" : "Selected"; }
  setTimeout(() => { said.textContent = "Copy"; }, 1600);
});
