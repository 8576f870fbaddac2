"""Routes around the model: embeddings, and text as tokens and back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from router.gateway.conversation import conversation
from router.gateway.embeddings import embed
from router.gateway.errors import invalid
from router.gateway.http import body_as, unless_gone
from router.gateway.openapi import body_of
from router.gateway.schemas.chat import ChatRequest
from router.gateway.schemas.embeddings import EmbeddingRequest
from router.gateway.schemas.tokens import DetokenizeRequest, TokenizeRequest
from router.gateway.service import Service


def routes(service: Service, check_ready: Callable[[], None]) -> APIRouter:
    """The routes over a service."""
    router = APIRouter()

    @router.post("/v1/embeddings", openapi_extra=body_of(EmbeddingRequest))
    async def embeddings(request: Request) -> Response:
        check_ready()
        wanted = await body_as(EmbeddingRequest, request)
        body = await unless_gone(request, embed(service, wanted))
        return JSONResponse(body)

    @router.post("/tokenize", openapi_extra=body_of(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        wanted = await body_as(TokenizeRequest, request)
        service.check_model(wanted.model)
        return await asyncio.to_thread(_tokenized, service, wanted)

    @router.post("/detokenize", openapi_extra=body_of(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        wanted = await body_as(DetokenizeRequest, request)
        service.check_model(wanted.model)
        text = await asyncio.to_thread(_detokenized, service, wanted)
        return JSONResponse({"prompt": text})

    return router


def _tokenized(service: Service, request: TokenizeRequest) -> Response:
    """Rendered as well: a long list takes the loop's time, too."""
    text = service.text
    if (request.prompt is None) == (request.messages is None):
        raise invalid("prompt: either prompt or messages, and not both", "prompt")
    most = service.limits.max_model_len
    chat_only = {"tools": request.tools, "chat_template_kwargs": request.chat_template_kwargs}
    prompt_only = {"add_special_tokens": request.add_special_tokens}
    for field, value in (chat_only if request.prompt is not None else prompt_only).items():
        if value is not None:
            raise invalid(f"{field}: not with {'prompt' if request.prompt is not None else 'messages'}", field)
    if request.prompt is not None:
        text.check_size(len(request.prompt), most, "prompt")
        tokens = text.encode(request.prompt, request.add_special_tokens is not False)
    else:
        chat = ChatRequest(model=request.model, messages=request.messages or [], tools=request.tools)
        messages, tools = conversation(chat, text.template or "")
        tokens, _ = text.chat(messages, tools, request.chat_template_kwargs, most)
    shown = {"token_strs": [text.name(token) for token in tokens]} if request.return_token_strs else {}
    return JSONResponse({"count": len(tokens), "max_model_len": most, "tokens": tokens, **shown})


def _detokenized(service: Service, request: DetokenizeRequest) -> str:
    most = service.limits.max_model_len
    if len(request.tokens) > most:
        raise invalid(f"tokens: {len(request.tokens)} tokens are more than the context of {most}", "tokens")
    return service.text.decode(service.known(request.tokens, "tokens"), skip_special_tokens=False)
